// A kernel called from Python: its arguments are taken out of a tuple here, which takes 2 us less than ctypes for sixteen of them.
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

int64_t integer(PyObject* value) {
    if (PyObject_IsInstance(value, &PyLong_Type)) return PyLong_AsLongLong(value);
    PyErr_Format(PyExc_TypeError, "expected an integer, got %R", value);  // a tensor of one element would pass for one
    return RAISED;
}

int64_t asked(PyObject* value, PyObject* method) {
    PyObject* result = PyObject_CallMethodObjArgs(value, method, nullptr);
    if (!result) return RAISED;
    const int64_t found = integer(result);
    Py_DecRef(result);
    return found;
}

// The address behind a pointer argument: None, an address, or an object whose data_ptr() is one.
int64_t address(PyObject* value) {
    static PyObject *const data_ptr = PyUnicode_InternFromString("data_ptr"), *const numel = PyUnicode_InternFromString("numel");
    if (value == &_Py_NoneStruct) return 0;
    if (PyObject_IsInstance(value, &PyLong_Type)) return PyLong_AsLongLong(value);
    const int64_t at = asked(value, data_ptr);
    if (at == 0 && asked(value, numel) != 0) {
        if (!PyErr_Occurred()) PyErr_Format(PyExc_TypeError, "a tensor that is not in memory, on the meta device or fake");
        return RAISED;
    }
    return at;
}

// Takes the arguments apart, threads after them; false with an exception set where one is not what its letter says.
bool unpack(const char* signature, PyObject* arguments, int64_t threads, int64_t* integers, float* floats) {
    const intptr_t given = PyTuple_Size(arguments);
    intptr_t i = 0;
    for (; signature[i] && i < given; ++i) {
        PyObject* value = PyTuple_GetItem(arguments, i);
        bool suspect;
        if (signature[i] == 'f') {
            *floats = float(PyFloat_AsDouble(value));
            suspect = *floats++ == RAISED;
        } else {
            *integers = signature[i] == 'p' ? address(value) : integer(value);
            suspect = *integers++ == RAISED;
        }
        if (suspect && PyErr_Occurred()) return false;
    }
    *integers = threads;
    if (!signature[i] && i == given) return true;
    PyErr_Format(PyExc_TypeError, "a kernel of arguments '%s' was given %zd", signature, given);
    return false;
}

}  // namespace

// Both are called with the interpreter held. signature: a letter per argument, p pointer, i int64, f float.

// Returns kernel(*arguments, threads); the interpreter is released while it runs.
ZM_API int64_t zm_call(void* kernel, const char* signature, PyObject* arguments, int64_t threads) {
    int64_t integers[zm::MOST_INTEGERS] = {};
    float floats[zm::MOST_FLOATS] = {};
    if (!unpack(signature, arguments, threads, integers, floats)) return RAISED;
    PyThreadState* state = PyEval_SaveThread();
    const int64_t result = zm::call(kernel, integers, floats);
    PyEval_RestoreThread(state);
    return result;
}

// The arguments of such a call, for zm_run_program.
ZM_API int64_t zm_unpack(const char* signature, PyObject* arguments, int64_t threads, int64_t* integers, float* floats) {
    return unpack(signature, arguments, threads, integers, floats) ? 0 : RAISED;
}
