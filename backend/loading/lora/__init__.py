"""LoRA and LoKr files: their keys, what they change, and how weights take them."""
