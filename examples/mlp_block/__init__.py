"""A user's own package: the target imports its activation relatively."""
