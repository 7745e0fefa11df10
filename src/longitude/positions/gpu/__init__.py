"""What runs on a GPU, in Triton: imported on use."""
