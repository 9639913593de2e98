"""What ms-swift imports: external_plugins names this file, and callbacks names "lohan"."""

import lohan.hf.swift

lohan.hf.swift.register(store="store", host_bytes="100MB")
