extern int fakecuda_unsupported(const char*);
int cudaDeviceGetDefaultMemPool(void) { return fakecuda_unsupported("cudaDeviceGetDefaultMemPool"); }
int cudaGraphAddNode(void) { return fakecuda_unsupported("cudaGraphAddNode"); }
int cudaGraphConditionalHandleCreate(void) { return fakecuda_unsupported("cudaGraphConditionalHandleCreate"); }
int cudaGraphDebugDotPrint(void) { return fakecuda_unsupported("cudaGraphDebugDotPrint"); }
int cudaGraphDestroy(void) { return fakecuda_unsupported("cudaGraphDestroy"); }
int cudaGraphExecDestroy(void) { return fakecuda_unsupported("cudaGraphExecDestroy"); }
int cudaGraphGetNodes(void) { return fakecuda_unsupported("cudaGraphGetNodes"); }
int cudaGraphInstantiateWithFlags(void) { return fakecuda_unsupported("cudaGraphInstantiateWithFlags"); }
int cudaGraphLaunch(void) { return fakecuda_unsupported("cudaGraphLaunch"); }
int cudaGraphNodeGetDependencies(void) { return fakecuda_unsupported("cudaGraphNodeGetDependencies"); }
int cudaIpcCloseMemHandle(void) { return fakecuda_unsupported("cudaIpcCloseMemHandle"); }
int cudaIpcGetEventHandle(void) { return fakecuda_unsupported("cudaIpcGetEventHandle"); }
int cudaIpcGetMemHandle(void) { return fakecuda_unsupported("cudaIpcGetMemHandle"); }
int cudaIpcOpenEventHandle(void) { return fakecuda_unsupported("cudaIpcOpenEventHandle"); }
int cudaIpcOpenMemHandle(void) { return fakecuda_unsupported("cudaIpcOpenMemHandle"); }
int cudaKernelSetAttributeForDevice(void) { return fakecuda_unsupported("cudaKernelSetAttributeForDevice"); }
int cudaLaunchCooperativeKernel(void) { return fakecuda_unsupported("cudaLaunchCooperativeKernel"); }
int cudaLibraryGetKernel(void) { return fakecuda_unsupported("cudaLibraryGetKernel"); }
int cudaLibraryLoadData(void) { return fakecuda_unsupported("cudaLibraryLoadData"); }
int cudaLibraryUnload(void) { return fakecuda_unsupported("cudaLibraryUnload"); }
int cudaMemPoolGetAttribute(void) { return fakecuda_unsupported("cudaMemPoolGetAttribute"); }
int cudaMemPoolSetAccess(void) { return fakecuda_unsupported("cudaMemPoolSetAccess"); }
int cudaMemPoolSetAttribute(void) { return fakecuda_unsupported("cudaMemPoolSetAttribute"); }
int cudaMemPoolTrimTo(void) { return fakecuda_unsupported("cudaMemPoolTrimTo"); }
int cudaOccupancyMaxActiveBlocksPerMultiprocessor(void) {
  return fakecuda_unsupported("cudaOccupancyMaxActiveBlocksPerMultiprocessor");
}
int cudaStreamBeginCapture(void) { return fakecuda_unsupported("cudaStreamBeginCapture"); }
int cudaStreamBeginCaptureToGraph(void) { return fakecuda_unsupported("cudaStreamBeginCaptureToGraph"); }
int cudaStreamEndCapture(void) { return fakecuda_unsupported("cudaStreamEndCapture"); }
int cudaStreamUpdateCaptureDependencies(void) { return fakecuda_unsupported("cudaStreamUpdateCaptureDependencies"); }
