"""The store on SSD: creating, filling, reading, exporting, copying and verifying it."""
