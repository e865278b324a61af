// Importing an extension module loads its library, whose kernels register themselves.
#pragma once

#include <Python.h>

#define CP_DISPATCH_MODULE(name)                                                                 \
  extern "C" PyMODINIT_FUNC PyInit_##name(void) {                                                \
    static PyModuleDef module = {PyModuleDef_HEAD_INIT, #name, nullptr, -1, nullptr, nullptr,    \
                                 nullptr, nullptr, nullptr};                                     \
    return PyModule_Create(&module);                                                             \
  }
