"""The logic of ``cython_ext/logic``, the very code that runs inside applications, for Python: tests and servers."""
from cython_ext.logic.alloctable cimport *
from cython_ext.logic.durations cimport *
from cython_ext.logic.gate cimport *
from cython_ext.logic.ledger cimport *
from cython_ext.logic.lock cimport *
from cython_ext.logic.plan cimport *
from cython_ext.logic.robust cimport *
from cython_ext.logic.window cimport *
from cython_ext.logic.wire cimport *
