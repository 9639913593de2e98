"""The rule of zeroth-order training, and the journal that records its steps."""
