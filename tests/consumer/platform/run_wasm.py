#!/usr/bin/env python3
"""run_wasm.py <module>: runs a program for WASI in wasmtime (from pip), with its output and exit status."""

import sys

import wasmtime

engine = wasmtime.Engine()
store = wasmtime.Store(engine)
wasi = wasmtime.WasiConfig()
wasi.argv = sys.argv[1:]
wasi.inherit_stdout()
wasi.inherit_stderr()
store.set_wasi(wasi)
linker = wasmtime.Linker(engine)
linker.define_wasi()
instance = linker.instantiate(store, wasmtime.Module.from_file(engine, sys.argv[1]))
try:
    instance.exports(store)["_start"](store)
except wasmtime.ExitTrap as exit:
    sys.exit(exit.code)
