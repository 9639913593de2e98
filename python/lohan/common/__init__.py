"""What every other package uses: sizes, files, statistics, the end of the process, metadata."""
