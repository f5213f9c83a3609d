"""The PyTorch face. Importing this package changes nothing; ``import paceline.torch`` turns DDP's acceleration on."""
