"""DLFS beside what a trainer would pick instead: the same samples, the same disk, the same run."""
