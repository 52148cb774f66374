// A kernel called from Python: its arguments are taken out of a tuple here, which costs a fifth of what ctypes takes for them.
#include "call.h"

#include "parallel.h"

// What is used of Python's stable interface, so that no header of Python's is needed to build the kernels.
extern "C" {
struct PyObject;
struct PyThreadState;
extern PyObject _Py_NoneStruct, PyLong_Type, *PyExc_TypeError;
intptr_t PyTuple_Size(PyObject*);
PyObject* PyTuple_GetItem(PyObject*, intptr_t);
int PyObject_IsInstance(PyObject*, PyObject*);
PyObject* PyObject_CallMethodObjArgs(PyObject*, PyObject*, ...);
PyObject* PyUnicode_InternFromString(const char*);
long long PyLong_AsLongLong(PyObject*);
double PyFloat_AsDouble(PyObject*);
PyObject* PyErr_Occurred();
PyObject* PyErr_Format(PyObject*, const char*, ...);
void Py_DecRef(PyObject*);
PyThreadState* PyEval_SaveThread();
void PyEval_RestoreThread(PyThreadState*);
}

namespace {

constexpr int64_t RAISED = -1;  // an exception is set, if that is also asked: the number may be a result

// The address behind a pointer argument: None, an address, or an object whose data_ptr() is one.
int64_t address(PyObject* value) {
    if (value == &_Py_NoneStruct) return 0;
    if (PyObject_IsInstance(value, &PyLong_Type)) return PyLong_AsLongLong(value);
    static PyObject* const data_ptr = PyUnicode_InternFromString("data_ptr");
    PyObject* result = PyObject_CallMethodObjArgs(value, data_ptr, nullptr);
    if (!result) return RAISED;
    const int64_t at = PyLong_AsLongLong(result);
    Py_DecRef(result);
    return at;
}

}  // namespace

// Returns kernel(*arguments, threads). signature: a letter per argument, p pointer, i int64, f float. Called with the interpreter
// held, which is released while the kernel runs; an exception is set where an argument is not what its letter says.
ZM_API int64_t zm_call(void* kernel, const char* signature, PyObject* arguments, int64_t threads) {
    int64_t integers[zm::MOST_INTEGERS] = {}, *integer = integers;
    float floats[zm::MOST_FLOATS] = {}, *real = floats;
    const intptr_t given = PyTuple_Size(arguments);
    intptr_t i = 0;
    for (; signature[i] && i < given; ++i) {
        PyObject* value = PyTuple_GetItem(arguments, i);
        bool suspect;
        if (signature[i] == 'f') {
            *real = float(PyFloat_AsDouble(value));
            suspect = *real++ == RAISED;
        } else {
            *integer = signature[i] == 'p' ? address(value) : PyLong_AsLongLong(value);
            suspect = *integer++ == RAISED;
        }
        if (suspect && PyErr_Occurred()) return RAISED;
    }
    if (signature[i] || i < given) {
        PyErr_Format(PyExc_TypeError, "a kernel of arguments '%s' was given %zd", signature, given);
        return RAISED;
    }
    *integer = threads;
    PyThreadState* state = PyEval_SaveThread();
    const int64_t result = zm::call(kernel, integers, floats);
    PyEval_RestoreThread(state);
    return result;
}
