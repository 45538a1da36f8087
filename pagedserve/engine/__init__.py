"""The engine: its front (text to tokens and back), its core (the loop), and the process border between them."""
