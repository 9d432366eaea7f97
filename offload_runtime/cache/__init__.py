"""Keys and values of committed and tentative tokens, in blocks of 256 tokens: on the device, or in host memory."""
