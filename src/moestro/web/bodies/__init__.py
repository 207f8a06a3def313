"""Request bodies: read, unpacked and bounded."""
