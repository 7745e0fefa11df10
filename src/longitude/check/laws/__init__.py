"""The laws of a checkpoint, by what they try: each is a function under `CHECKPOINT_LAWS.law`, which gives its threshold."""
