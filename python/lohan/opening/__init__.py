"""From the arguments of `lohan.wrap` to an open session: checks, the store, the attached model."""
