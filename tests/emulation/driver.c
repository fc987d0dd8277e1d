/* The calls of a kernel's host function to the CUDA driver, without a device: launches are passed
   to Python.  A kernel's handle is its name. */

#include <string.h>

static int (*launched)(const char *kernel, const void *shape, void **parameters);
static void *library[1];

void on_launch(int (*callback)(const char *, const void *, void **)) { launched = callback; }

int _cudaLaunchKernelEx(const void *shape, const char *kernel, void **parameters) {
    return launched(kernel, shape, parameters);
}

int _cudaLibraryGetKernel(const char **kernel, void *loaded, const char *name) {
    *kernel = strdup(name);
    return 0;
}

int cuda_dialect_init_library_once(void *state, int (*init)(void **), int (*load)(void **, int)) {
    static int done = 0;
    if (done) return 0;
    done = 1;
    return init(library) || load(library, 0);
}

int _cudaLibraryLoadData(void **loaded) { return 0; }
int _cudaDeviceGetAttribute(int *value) { return *value = 0; }
int _cudaGetDevice(int *device) { return *device = 0; }
int _cudaSetDevice(int device) { return 0; }
int _cudaFuncSetAttribute(void) { return 0; }
int _cudaKernelSetAttributeForDevice(void) { return 0; }
int _cuKernelGetAttribute(int *value) { return *value = 0; }
int CuteDSLRT_TVMFFISetRaisedCudaError(void) { return -1; }
int cuda_dialect_unload_library_once(void) { return 0; }
