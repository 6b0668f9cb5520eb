"""What the folders share: files, values, memory, devices."""
