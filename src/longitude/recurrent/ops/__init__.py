"""Operations of recurrent mixers: matrix states with decay or a delta rule, scans, and their C and CUDA kernels."""
