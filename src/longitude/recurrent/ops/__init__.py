"""What recurrent mixers share: decayed states, scans, short convolutions, and their loops in C."""
