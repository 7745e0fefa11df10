"""Operations of recurrent mixers: decayed states, scans, short convolutions, and their C kernels."""
