/* A CUDA runtime without a GPU: memory is the host's, streams and events finish at once, and no kernel can be launched.

   Only what torch calls when it allocates, copies and asks for a device's properties is here; build_libraries.py makes every other
   symbol of NVIDIA's libraries return an error, so that an operator that gets past the simulation (device.py) is an error and not
   a wrong number. Compiled with the headers of NVIDIA's cuda-runtime wheel. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include "driver_types.h"
#define CUDART_API __attribute__((visibility("default")))

enum { MAX_DEVICES = 16, MAX_BLOCKS = 1 << 18 };
static const size_t TOTAL = (size_t)143771 << 20; /* an H200's */

enum { PINNED = -1, REGISTERED = -2 }; /* the device of host memory: taken here, and somebody else's */
typedef struct { char *start; size_t size; int device; } Block;
static Block blocks[MAX_BLOCKS];
static int block_count;
static size_t used[MAX_DEVICES];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static __thread int current;

static int device_count(void) {
  const char *visible = getenv("CUDA_VISIBLE_DEVICES"), *all = getenv("SIMULATED_CUDA_DEVICES");
  int most = all ? atoi(all) : 8, count = 1;
  if (most > MAX_DEVICES) most = MAX_DEVICES;
  if (!visible) return most;
  if (!*visible || *visible == '-') return 0;
  for (; *visible; visible++) count += *visible == ',';
  return count < most ? count : most;
}

static cudaError_t take(void **pointer, size_t size, int device) {
  *pointer = NULL;
  if (size == 0) return cudaSuccess;
  pthread_mutex_lock(&lock);
  int slot = 0;
  while (slot < block_count && blocks[slot].start) slot++;
  cudaError_t result = cudaSuccess;
  if (slot == MAX_BLOCKS || (device >= 0 && used[device] + size > TOTAL) || posix_memalign(pointer, 512, size)) {
    *pointer = NULL;
    result = cudaErrorMemoryAllocation;
  } else {
    blocks[slot] = (Block){*pointer, size, device};
    if (slot == block_count) block_count++;
    if (device >= 0) used[device] += size;
  }
  pthread_mutex_unlock(&lock);
  return result;
}

static cudaError_t give_back(void *pointer) {
  if (!pointer) return cudaSuccess;
  cudaError_t result = cudaErrorInvalidValue;
  pthread_mutex_lock(&lock);
  for (int i = 0; i < block_count; i++)
    if (blocks[i].start == pointer) {
      if (blocks[i].device >= 0) used[blocks[i].device] -= blocks[i].size;
      blocks[i].start = NULL;
      if (blocks[i].device != REGISTERED) free(pointer);
      result = cudaSuccess;
      break;
    }
  pthread_mutex_unlock(&lock);
  return result;
}

CUDART_API cudaError_t cudaGetDeviceCount(int *count) { return (*count = device_count()) ? cudaSuccess : cudaErrorNoDevice; }
CUDART_API cudaError_t cudaGetDevice(int *device) { *device = current; return cudaSuccess; }
CUDART_API cudaError_t cudaSetDevice(int device) {
  if (device < 0 || device >= device_count()) return cudaErrorInvalidDevice;
  current = device;
  return cudaSuccess;
}
CUDART_API cudaError_t cudaDeviceSynchronize(void) { return cudaSuccess; }
/* A kernel that is launched all the same is torch's next check for an error. */
static __thread cudaError_t last_error;
CUDART_API cudaError_t cudaGetLastError(void) {
  cudaError_t error = last_error;
  last_error = cudaSuccess;
  return error;
}
CUDART_API cudaError_t cudaPeekAtLastError(void) { return last_error; }
CUDART_API cudaError_t __cudaPopCallConfiguration(void *grid, void *block, size_t *shared, void *stream) { return last_error = cudaErrorNotSupported; }
CUDART_API cudaError_t cudaLaunchKernel(const void *function) { return last_error = cudaErrorNotSupported; }
CUDART_API cudaError_t __cudaLaunchKernel(void *function) { return last_error = cudaErrorNotSupported; }
CUDART_API cudaError_t cudaLaunchKernelExC(const void *configuration) { return last_error = cudaErrorNotSupported; }
CUDART_API cudaError_t cudaLaunchCooperativeKernel(const void *function) { return last_error = cudaErrorNotSupported; }
CUDART_API cudaError_t cudaMalloc(void **pointer, size_t size) { return take(pointer, size, current); }
CUDART_API cudaError_t cudaMallocAsync(void **pointer, size_t size, cudaStream_t stream) { return take(pointer, size, current); }
CUDART_API cudaError_t cudaFree(void *pointer) { return give_back(pointer); }
CUDART_API cudaError_t cudaFreeAsync(void *pointer, cudaStream_t stream) { return give_back(pointer); }
CUDART_API cudaError_t cudaHostAlloc(void **pointer, size_t size, unsigned flags) { return take(pointer, size ? size : 1, PINNED); }
CUDART_API cudaError_t cudaHostRegister(void *pointer, size_t size, unsigned flags) {
  pthread_mutex_lock(&lock);
  int slot = 0;
  while (slot < block_count && blocks[slot].start) slot++;
  if (slot < MAX_BLOCKS) blocks[slot] = (Block){pointer, size, REGISTERED};
  if (slot == block_count && slot < MAX_BLOCKS) block_count++;
  pthread_mutex_unlock(&lock);
  return slot < MAX_BLOCKS ? cudaSuccess : cudaErrorMemoryAllocation;
}
CUDART_API cudaError_t cudaHostUnregister(void *pointer) { return give_back(pointer); }
CUDART_API cudaError_t cudaFreeHost(void *pointer) { return give_back(pointer); }
CUDART_API cudaError_t cudaMemcpy(void *to, const void *from, size_t size, enum cudaMemcpyKind kind) { memmove(to, from, size); return cudaSuccess; }
CUDART_API cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t size, enum cudaMemcpyKind kind, cudaStream_t stream) {
  memmove(to, from, size);
  return cudaSuccess;
}
CUDART_API cudaError_t cudaMemcpyPeerAsync(void *to, int on, const void *from, int source, size_t size, cudaStream_t stream) {
  memmove(to, from, size);
  return cudaSuccess;
}
CUDART_API cudaError_t cudaMemset(void *to, int value, size_t size) { memset(to, value, size); return cudaSuccess; }
CUDART_API cudaError_t cudaMemsetAsync(void *to, int value, size_t size, cudaStream_t stream) { memset(to, value, size); return cudaSuccess; }
CUDART_API cudaError_t cudaMemGetInfo(size_t *free_bytes, size_t *total) {
  *total = TOTAL;
  *free_bytes = TOTAL - used[current];
  return cudaSuccess;
}
CUDART_API cudaError_t cudaRuntimeGetVersion(int *version) { *version = 13000; return cudaSuccess; }
CUDART_API cudaError_t cudaDriverGetVersion(int *version) { *version = 13000; return cudaSuccess; }

static uintptr_t last_handle = 0x1000;
static void *handle(void) { return (void *)__sync_add_and_fetch(&last_handle, 16); }
CUDART_API cudaError_t cudaStreamCreate(cudaStream_t *stream) { *stream = handle(); return cudaSuccess; }
CUDART_API cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned flags) { *stream = handle(); return cudaSuccess; }
CUDART_API cudaError_t cudaStreamCreateWithPriority(cudaStream_t *stream, unsigned flags, int priority) { *stream = handle(); return cudaSuccess; }
CUDART_API cudaError_t cudaStreamDestroy(cudaStream_t stream) { return cudaSuccess; }
CUDART_API cudaError_t cudaStreamQuery(cudaStream_t stream) { return cudaSuccess; }
CUDART_API cudaError_t cudaStreamSynchronize(cudaStream_t stream) { return cudaSuccess; }
CUDART_API cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags) { return cudaSuccess; }
CUDART_API cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
  if (least) *least = 0;
  if (greatest) *greatest = -5;
  return cudaSuccess;
}
CUDART_API cudaError_t cudaStreamGetPriority(cudaStream_t stream, int *priority) { *priority = 0; return cudaSuccess; }
CUDART_API cudaError_t cudaStreamIsCapturing(cudaStream_t stream, enum cudaStreamCaptureStatus *status) {
  *status = cudaStreamCaptureStatusNone;
  return cudaSuccess;
}
/* cudaStreamGetCaptureInfo has one form in each version of CUDA; all begin with these. */
CUDART_API cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, enum cudaStreamCaptureStatus *status, unsigned long long *id) {
  *status = cudaStreamCaptureStatusNone;
  if (id) *id = 0;
  return cudaSuccess;
}
CUDART_API cudaError_t cudaThreadExchangeStreamCaptureMode(enum cudaStreamCaptureMode *mode) { return cudaSuccess; }
CUDART_API cudaError_t cudaEventCreate(cudaEvent_t *event) { *event = calloc(1, sizeof(double)); return cudaSuccess; }
CUDART_API cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned flags) { return cudaEventCreate(event); }
CUDART_API cudaError_t cudaEventDestroy(cudaEvent_t event) { free(event); return cudaSuccess; }
CUDART_API cudaError_t cudaEventQuery(cudaEvent_t event) { return cudaSuccess; }
CUDART_API cudaError_t cudaEventSynchronize(cudaEvent_t event) { return cudaSuccess; }
CUDART_API cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  *(double *)event = now.tv_sec * 1e3 + now.tv_nsec * 1e-6;
  return cudaSuccess;
}
CUDART_API cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned flags) { return cudaEventRecord(event, stream); }
CUDART_API cudaError_t cudaEventElapsedTime(float *milliseconds, cudaEvent_t from, cudaEvent_t to) {
  *milliseconds = *(double *)to - *(double *)from;
  return cudaSuccess;
}
CUDART_API const char *cudaGetErrorName(cudaError_t error) {
  return error == cudaErrorMemoryAllocation ? "cudaErrorMemoryAllocation" : error == cudaErrorNotSupported ? "cudaErrorNotSupported" : "cudaError";
}
CUDART_API const char *cudaGetErrorString(cudaError_t error) {
  if (error == cudaErrorMemoryAllocation) return "out of memory";
  if (error == cudaErrorNotSupported) return "the simulated CUDA device runs no kernels: this operator was not simulated";
  return error == cudaErrorNoDevice ? "no CUDA-capable device is detected" : "an error of the simulated CUDA device";
}
CUDART_API cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr attribute, int device) {
  switch (attribute) {
    case cudaDevAttrComputeCapabilityMajor: *value = 9; break;
    case cudaDevAttrComputeCapabilityMinor: *value = 0; break;
    case cudaDevAttrMultiProcessorCount: *value = 132; break;
    case cudaDevAttrWarpSize: *value = 32; break;
    case cudaDevAttrMaxThreadsPerBlock: *value = 1024; break;
    case cudaDevAttrMaxSharedMemoryPerBlock: *value = 49152; break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = 232448; break;
    default: *value = 1;
  }
  return cudaSuccess;
}
CUDART_API cudaError_t cudaDeviceCanAccessPeer(int *can, int device, int peer) { *can = 1; return cudaSuccess; }
CUDART_API cudaError_t cudaDeviceEnablePeerAccess(int peer, unsigned flags) { return cudaSuccess; }
CUDART_API cudaError_t cudaDeviceGetPCIBusId(char *id, int size, int device) { snprintf(id, size, "0000:%02x:00.0", device); return cudaSuccess; }
CUDART_API cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *attributes, const void *pointer) {
  memset(attributes, 0, sizeof *attributes);
  attributes->type = cudaMemoryTypeUnregistered;
  attributes->hostPointer = (void *)pointer;
  pthread_mutex_lock(&lock);
  for (int i = 0; i < block_count; i++)
    if (blocks[i].start && (char *)pointer >= blocks[i].start && (char *)pointer < blocks[i].start + blocks[i].size) {
      attributes->type = blocks[i].device < 0 ? cudaMemoryTypeHost : cudaMemoryTypeDevice;
      attributes->device = blocks[i].device < 0 ? 0 : blocks[i].device;
      if (blocks[i].device >= 0) attributes->devicePointer = (void *)pointer;
      break;
    }
  pthread_mutex_unlock(&lock);
  return cudaSuccess;
}
CUDART_API cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *properties, int device) {
  memset(properties, 0, sizeof *properties);
  strcpy(properties->name, "NVIDIA H200 (simulated)");
  properties->totalGlobalMem = TOTAL;
  properties->major = 9;
  properties->multiProcessorCount = 132;
  properties->warpSize = 32;
  properties->maxThreadsPerBlock = 1024;
  properties->maxThreadsPerMultiProcessor = 2048;
  properties->sharedMemPerBlock = 49152;
  properties->sharedMemPerBlockOptin = 232448;
  properties->sharedMemPerMultiprocessor = 233472;
  properties->regsPerBlock = properties->regsPerMultiprocessor = 65536;
  properties->l2CacheSize = 60 << 20;
  properties->pciBusID = device;
  properties->maxGridSize[0] = 2147483647;
  properties->maxGridSize[1] = properties->maxGridSize[2] = 65535;
  properties->maxThreadsDim[0] = properties->maxThreadsDim[1] = 1024;
  properties->maxThreadsDim[2] = 64;
  return cudaSuccess;
}
CUDART_API cudaError_t cudaGetDriverEntryPointByVersion(const char *name, void **function, unsigned version, unsigned long long flags,
                                                        enum cudaDriverEntryPointQueryResult *status) {
  void *driver = dlopen("libcuda.so.1", RTLD_NOW);
  *function = driver ? dlsym(driver, name) : NULL;
  if (status) *status = *function ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
  return *function ? cudaSuccess : cudaErrorSymbolNotFound;
}

/* What the static initialisers of torch's libraries call to register their kernels. */
CUDART_API void **__cudaRegisterFatBinary(void *binary) { static void *registered[4]; return registered; }
CUDART_API void __cudaRegisterFatBinaryEnd(void **handle) {}
CUDART_API void __cudaUnregisterFatBinary(void **handle) {}
CUDART_API void __cudaRegisterFunction(void) {}
CUDART_API void __cudaRegisterVar(void) {}
CUDART_API char __cudaInitModule(void **handle) { return 0; }
CUDART_API unsigned __cudaPushCallConfiguration(void) { return 0; }
