"""What several examples share; a program that imports it is copied with this folder."""
