"""A package, so that test files find what they share by name wherever pytest was started."""
