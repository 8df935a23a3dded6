"""The Triton kernels, each under the name of its twin in `leyline_kernels.reference`.

Importing a module of this package imports Triton; importing the package alone does not.
"""
