"""Executes compiled kernels without a GPU: an interpreter of PTX with the checks of a sanitizer.

:func:`execute` runs any Triton kernel; :func:`executed` runs this package's own launches. From text
to result: ``program`` (the parser), ``instructions`` with ``arithmetic``, ``comparisons``,
``bits``, ``conversions``, ``movement``, ``warps`` and ``matrices`` (what each opcode does),
``machine`` (registers of all lanes), ``memory`` (bounds, alignment, shared races), ``scheduler``
(divergence and barriers), ``races`` (global memory), ``report`` (findings and counts).

What it does not know: time, caches, the assembler's SASS, drivers. Programs are checked as they
ran: a race on a path that no thread took is not seen.
"""

from curvlab_kernels.audit.ptx.launching import execute, executed
from curvlab_kernels.audit.ptx.program import UnknownInstruction
from curvlab_kernels.audit.ptx.report import Fault, Report

__all__ = ["Fault", "Report", "UnknownInstruction", "execute", "executed"]
