#include <stddef.h>
#include <string.h>
typedef int CUresult;
typedef int CUdevice;
extern void fakecuda_touch(int) __attribute__((weak));
extern int fakecuda_has_context(int) __attribute__((weak));
CUresult cuDeviceGet(CUdevice* d, int i) {
  *d = i;
  return 0;
}
CUresult cuDeviceGetAttribute(int* v, int a, CUdevice d) {
  *v = 0;
  return 0;
}
CUresult cuGetErrorString(CUresult e, const char** s) {
  *s = "fake driver error";
  return 0;
}
CUresult cuInit(unsigned f) { return 0; }
CUresult cuDriverGetVersion(int* v) {
  *v = 13000;
  return 0;
}
CUresult cuDevicePrimaryCtxGetState(CUdevice d, unsigned* flags, int* active) {
  if (flags) *flags = 0;
  *active = fakecuda_has_context ? fakecuda_has_context(d) : 0;
  return 0;
}
CUresult cuCtxGetCurrent(void** c) {
  static int x;
  *c = &x;
  return 0;
}
CUresult cuCtxSetCurrent(void* c) { return 0; }
CUresult cuCtxFromGreenCtx(void) { return 801; }
CUresult cuCtxPopCurrent(void) { return 801; }
CUresult cuCtxPushCurrent(void) { return 801; }
CUresult cuDevResourceGenerateDesc(void) { return 801; }
CUresult cuDevSmResourceSplitByCount(void) { return 801; }
CUresult cuDeviceGetDevResource(void) { return 801; }
CUresult cuDevicePrimaryCtxRetain(void) { return 801; }
CUresult cuFuncGetAttribute(void) { return 801; }
CUresult cuFuncSetAttribute(void) { return 801; }
CUresult cuFuncSetCacheConfig(void) { return 801; }
CUresult cuGreenCtxCreate(void) { return 801; }
CUresult cuGreenCtxDestroy(void) { return 801; }
CUresult cuGreenCtxStreamCreate(void) { return 801; }
CUresult cuLaunchCooperativeKernel(void) { return 801; }
CUresult cuLaunchKernel(void) { return 801; }
CUresult cuLinkAddData_v2(void) { return 801; }
CUresult cuLinkComplete(void) { return 801; }
CUresult cuLinkCreate_v2(void) { return 801; }
CUresult cuMemAddressFree(void) { return 801; }
CUresult cuMemAddressReserve(void) { return 801; }
CUresult cuMemCreate(void) { return 801; }
CUresult cuMemExportToShareableHandle(void) { return 801; }
CUresult cuMemGetAddressRange(void) { return 801; }
CUresult cuMemGetAllocationGranularity(void) { return 801; }
CUresult cuMemGetAllocationPropertiesFromHandle(void) { return 801; }
CUresult cuMemImportFromShareableHandle(void) { return 801; }
CUresult cuMemMap(void) { return 801; }
CUresult cuMemRelease(void) { return 801; }
CUresult cuMemRetainAllocationHandle(void) { return 801; }
CUresult cuMemSetAccess(void) { return 801; }
CUresult cuMemUnmap(void) { return 801; }
CUresult cuMemsetD32Async(void) { return 801; }
CUresult cuModuleGetFunction(void) { return 801; }
CUresult cuModuleLoad(void) { return 801; }
CUresult cuModuleLoadData(void) { return 801; }
CUresult cuModuleLoadDataEx(void) { return 801; }
CUresult cuModuleUnload(void) { return 801; }
CUresult cuMulticastAddDevice(void) { return 801; }
CUresult cuMulticastBindMem(void) { return 801; }
CUresult cuMulticastCreate(void) { return 801; }
CUresult cuMulticastUnbind(void) { return 801; }
CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(void) { return 801; }
CUresult cuPointerGetAttribute(void) { return 801; }
CUresult cuStreamWriteValue32(void) { return 801; }
CUresult cuTensorMapEncodeTiled(void) { return 801; }
