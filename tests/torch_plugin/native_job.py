"""PyTorch's own caching allocator, over a stand-in for the CUDA runtime, beside FCDP's pages on the same
simulated device. argv: the library made of native.cpp, the simulated driver's path, the stand-in's path."""

import ctypes
import sys
import threading

import torch

from fcdp import _fcdp

MIB = 1 << 20
DONE, OUT_OF_MEMORY = 0, 1


class Native:
    def __init__(self, path):
        self.lib = ctypes.CDLL(path)
        self.text = ctypes.create_string_buffer(4096)

    def call(self, name, *args):
        code = getattr(self.lib, "native_" + name)(*args, self.text, ctypes.c_size_t(len(self.text)))
        return code, self.text.value.decode() if code != DONE else ""

    def malloc(self, bytes_):
        out = ctypes.c_void_p()
        code, text = self.call("malloc", ctypes.c_size_t(bytes_), ctypes.byref(out))
        return code, text, out.value


def main():
    native, standin = Native(sys.argv[1]), ctypes.CDLL(sys.argv[3])
    _fcdp.options_load()
    assert native.call("init") == (DONE, "")
    hooks = _fcdp.tensors_enable(_fcdp.DRIVER_SIM, sys.argv[2])
    ours = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p)(hooks["malloc"])
    frees = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p)(hooks["free"])

    def idle(n_mib):  # pages of FCDP's that nothing lies on
        at = [ours(8 * MIB, 0, None) for _ in range(n_mib // 8)]
        for address in at:
            frees(address, 8 * MIB, 0, None)

    engine = _fcdp.create_engine(_fcdp.DRIVER_SIM, 0, sys.argv[2], True, True, True)
    idle(48)  # of the device's 64 MiB
    code, text, _ = native.malloc(40 * MIB)
    assert code == OUT_OF_MEMORY and "CUDA out of memory" in text, (code, text)  # the pool is not asked

    assert engine.share_device(torch.cuda.empty_cache)
    code, text, at = native.malloc(40 * MIB)
    assert code == DONE, text
    assert standin.standin_last_error() == 0  # else the next kernel launch would be taken to have failed
    n_mallocs = standin.standin_mallocs()
    code, text, _ = native.malloc(40 * MIB)  # nothing that could be given back would do
    assert code == OUT_OF_MEMORY, (code, text)
    assert n_mallocs < standin.standin_mallocs() <= n_mallocs + 6
    assert native.call("free", ctypes.c_void_p(at))[0] == DONE
    assert native.call("empty_cache") == (DONE, "")

    # On threads that come and go, beside FCDP's own use of the pages.
    results = []

    def alternate():
        for _ in range(20):
            code, text, at = native.malloc(24 * MIB)
            if code == DONE:
                native.call("free", ctypes.c_void_p(at))
            native.call("empty_cache")
            results.append((code, text))

    threads = [threading.Thread(target=alternate) for _ in range(2)]
    for thread in threads:
        thread.start()
    for _ in range(20):
        idle(8)
    for thread in threads:
        thread.join()
    assert {code for code, _ in results} == {DONE}, results

    idle(48)
    engine.destroy()
    code, text, _ = native.malloc(40 * MIB)  # the pool that it would ask has gone
    assert code == OUT_OF_MEMORY, (code, text)
    print("all is well")


if __name__ == "__main__":
    main()
