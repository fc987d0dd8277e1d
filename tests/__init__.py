"""Tests; a package, since verl installs another one of this name."""
