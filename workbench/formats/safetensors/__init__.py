"""safetensors files, their index, and a file per rank."""
