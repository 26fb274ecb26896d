"""Small parts that all others use: arguments, closing, deadlines, forks, threads, units."""
