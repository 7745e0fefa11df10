"""Numbers in, numbers out: intervals over documents and seeds, of proportions, of differences and ratios; comparisons."""
