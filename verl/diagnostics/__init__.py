"""What a run will need and what it took, told from outside. This room looks down into all below it
and owns nothing."""
