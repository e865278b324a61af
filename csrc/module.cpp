// Importing cp_dispatch._C loads this library, whose kernels register themselves.
#include <Python.h>

extern "C" PyMODINIT_FUNC PyInit__C(void) {
  static PyModuleDef module = {PyModuleDef_HEAD_INIT, "_C", nullptr, -1, nullptr,
                               nullptr,               nullptr, nullptr, nullptr};
  return PyModule_Create(&module);
}
