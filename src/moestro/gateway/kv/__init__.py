"""KV events of engines, and the blocks of prompts that match them."""
