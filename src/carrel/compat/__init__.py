"""The names of four earlier packages, so that their programs run on carrel after a change of the import line."""
