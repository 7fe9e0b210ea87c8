"""Assurance of the GPU kernels: agreement with the reference, compiled code, and a GPU's own word.

``python -m curvlab_kernels.audit`` (report.py) reads the compiled kernels without a GPU;
``python -m curvlab_kernels.audit.gpu_check`` confirms on a GPU what only a GPU can.
"""
