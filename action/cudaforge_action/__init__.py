"""pytest_cudaforge in CI: what GitHub (and GitLab, and a plain machine) must be told, asked and protected from.

The package `pytest_cudaforge` knows nothing of any of this. ``python -m cudaforge_action MODE`` is the one entry;
``action.yml`` only wires it. Modules named like a mode hold the order of that mode's steps.
"""
