"""The strategies, one file each: what is kept whole, what is sharded, and when it moves."""
