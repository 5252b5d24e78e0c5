"""What a graph holds, and that its pieces compute what the whole does."""
