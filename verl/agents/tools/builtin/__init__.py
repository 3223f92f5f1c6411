"""Tools that come with this package. They run in the trainer's process."""
