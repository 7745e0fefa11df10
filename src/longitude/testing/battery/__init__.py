"""The laws of encodings and mixers: each is a function under `law`, which gives its threshold. A new law is one file here."""
