// A CUDA runtime without a GPU: device memory is host memory, kernels launched do nothing (values come from CPU kernels
// that fakeops registers), copies and NCCL on side streams run in a thread of their own after a lag, as a slow GPU
// would.
#include <cuda_runtime_api.h>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <set>
#include <thread>
#include <string>
#include <vector>
#include <fcntl.h>
#include <dlfcn.h>
#include <execinfo.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

using Clock = std::chrono::steady_clock;
static long env(const char* n, long d) {
  const char* v = getenv(n);
  return v && *v ? atol(v) : d;
}
static const int kMax = 16;
static int ndev() {
  static int n = [] {  // CUDA_VISIBLE_DEVICES of plain ordinals
    int all = (int)env("FAKECUDA_DEVICES", 2);
    const char* m = getenv("CUDA_VISIBLE_DEVICES");
    if (!m) return all;
    int k = 0;
    std::string s(m);
    size_t p = 0;
    while (p < s.size()) {
      int v = atoi(s.c_str() + p);
      if (v < 0 || v >= all) break;
      k++;
      p = s.find(',', p);
      if (p == std::string::npos) break;
      p++;
    }
    return k;
  }();
  return n;
}
static int physical(int i) {
  const char* m = getenv("CUDA_VISIBLE_DEVICES");
  if (!m) return i;
  std::string s(m);
  size_t p = 0;
  for (int k = 0; k < i; k++) {
    p = s.find(',', p);
    if (p == std::string::npos) return i;
    p++;
  }
  return atoi(s.c_str() + p);
}
static size_t memory() {
  static size_t n = (size_t)env("FAKECUDA_MB", 16384) << 20;
  return n;
}
// How late side streams are. A wait for one ends it, so that a long one costs only where nobody waits.
static std::atomic<long>& lag_us() {
  static std::atomic<long> n{env("FAKECUDA_LAG_US", 2000)};
  return n;
}
extern "C" long fakecuda_set_lag_us(long us) { return lag_us().exchange(us); }

static void logf(const char* fmt, ...) {
  static const char* f = getenv("FAKECUDA_LOG");
  if (!f) return;
  char b[512];
  va_list a;
  va_start(a, fmt);
  int n = vsnprintf(b, 500, fmt, a);
  va_end(a);
  char line[600];
  int m = snprintf(line, sizeof line, "%d %.*s\n", getpid(), n, b);
  int fd = open(f, O_WRONLY | O_APPEND | O_CREAT, 0666);
  if (fd >= 0) {
    (void)!write(fd, line, m);
    close(fd);
  }
}

// A synchronisation is counted, and told in FAKECUDA_LOG; with its callers in the file FAKECUDA_TRACE and the process id.
static std::atomic<long> n_sync{0};
static void synchronised(const char* why) {
  n_sync++;
  logf("sync %s", why);
  static const char* prefix = getenv("FAKECUDA_TRACE");
  if (!prefix) return;
  static std::mutex& one = *new std::mutex;
  std::lock_guard<std::mutex> l(one);
  int fd = open((std::string(prefix) + "." + std::to_string(getpid())).c_str(), O_WRONLY | O_APPEND | O_CREAT, 0666);
  if (fd < 0) return;
  dprintf(fd, "sync %s, thread %d\n", why, (int)gettid());
  void* frames[12];
  backtrace_symbols_fd(frames, backtrace(frames, 12), fd);
  // A thread that runs Python tells where.
  static auto state = (void* (*)())dlsym(RTLD_DEFAULT, "PyGILState_GetThisThreadState");
  static auto dump = (void (*)(int, void*))dlsym(RTLD_DEFAULT, "_Py_DumpTraceback");
  if (void* thread = state && dump ? state() : nullptr) dump(fd, thread);
  dprintf(fd, "\n");
  close(fd);
}

struct Stream {
  int dev;
  int priority;
  std::mutex m;
  std::condition_variable cv;
  std::deque<std::pair<std::function<void()>, Clock::time_point>> q;
  unsigned long enq = 0, done = 0;
  bool started = false;
  int waiters = 0;
  bool idle() {
    std::lock_guard<std::mutex> l(m);
    return done >= enq;
  }
};
struct Event {
  Stream* s = nullptr;
  unsigned long seq = 0;
  Clock::time_point at;
};

static thread_local int t_dev = 0;
static thread_local cudaError_t t_err = cudaSuccess;
// Never destroyed: threads wait on these until the process ends, and the end would wait for the threads.
static std::mutex& g = *new std::mutex;
static bool ctx[kMax];
static int ctx_fd[kMax];
static size_t used[kMax];
static auto& mem = *new std::map<char*, std::pair<size_t, int>>;  // device memory: size, device
static auto& pinned = *new std::map<char*, size_t>;
static auto& streams = *new std::set<Stream*>;
static Stream* const defaults = new Stream[kMax];
static std::atomic<long> n_stream{0}, n_hostalloc{0}, n_kernel{0}, n_to_device{0}, n_to_host{0};
static const void* spin = nullptr;  // torch.cuda._sleep's kernel, the only one that takes time
static pid_t owner = 0;             // the process that CUDA was started in: a fork of it can't use CUDA
static bool forked() {
  static std::mutex o;
  std::lock_guard<std::mutex> l(o);
  if (!owner) owner = getpid();
  return owner != getpid();
}

static cudaError_t fail(cudaError_t e) {
  t_err = e;
  return e;
}
static cudaError_t context(int d) {  // a primary context comes with the first real use of a device
  if (forked()) return fail(cudaErrorInitializationError);
  if (d < 0 || d >= ndev()) return fail(cudaErrorInvalidDevice);
  std::lock_guard<std::mutex> l(g);
  if (ctx[d]) return cudaSuccess;
  const char* exclusive = getenv("FAKECUDA_EXCLUSIVE");
  if (exclusive && *exclusive) {
    char p[256];
    snprintf(p, sizeof p, "/tmp/fakecuda-exclusive-%s-%d", exclusive, physical(d));
    int fd = open(p, O_RDWR | O_CREAT | O_CLOEXEC, 0666);
    if (flock(fd, LOCK_EX | LOCK_NB)) {
      close(fd);
      logf("context device %d REFUSED", physical(d));
      return fail(cudaErrorDevicesUnavailable);
    }
    ctx_fd[d] = fd;
  }
  ctx[d] = true;
  logf("context device %d", physical(d));
  return cudaSuccess;
}
static Stream* S(cudaStream_t s) {
  if (s == nullptr || (size_t)s < 4096) {
    defaults[t_dev].dev = t_dev;
    return &defaults[t_dev];
  }
  return (Stream*)s;
}
static bool is_default(Stream* s) { return s >= defaults && s < defaults + kMax; }

static void worker(Stream* s) {
  for (;;) {
    std::function<void()> f;
    {
      std::unique_lock<std::mutex> l(s->m);
      s->cv.wait(l, [&] { return !s->q.empty(); });
      while (!s->waiters && Clock::now() < s->q.front().second) s->cv.wait_until(l, s->q.front().second);
      f = std::move(s->q.front().first);
    }
    f();
    {
      std::lock_guard<std::mutex> l(s->m);
      s->q.pop_front();
      s->done++;
    }
    s->cv.notify_all();
  }
}
static void wait_for(Stream* s, unsigned long seq) {
  std::unique_lock<std::mutex> l(s->m);
  s->waiters++;
  s->cv.notify_all();
  s->cv.wait(l, [&] { return s->done >= seq; });
  s->waiters--;
}
static void queue(Stream* s, std::function<void()> f) {
  std::lock_guard<std::mutex> l(s->m);
  auto lag = std::chrono::microseconds(is_default(s) ? 0 : lag_us().load());
  s->q.emplace_back(std::move(f), Clock::now() + lag);
  s->enq++;
  if (!s->started) {
    s->started = true;
    std::thread(worker, s).detach();
  }
  s->cv.notify_all();
}
extern "C" void fakecuda_enqueue(cudaStream_t cs, std::function<void()> f) {
  Stream* s = S(cs);
  // The default stream does at once what it is asked, unless something is in its queue.
  if (is_default(s) && s->idle()) {
    f();
    return;
  }
  queue(s, std::move(f));
}
// What may take long: a kernel that spins, a wait for another stream, a collective. The host never waits for it.
extern "C" void fakecuda_enqueue_long(cudaStream_t cs, std::function<void()> f) { queue(S(cs), std::move(f)); }
extern "C" void fakecuda_drain(cudaStream_t cs) {
  Stream* s = S(cs);
  if (!s->idle()) wait_for(s, s->enq);
}
// A kernel that makes the host wait for its result, as nonzero does.
extern "C" void fakecuda_note_sync(const char* why) {
  synchronised(why);
}
extern "C" long fakecuda_counter(int which) {
  switch (which) {
    case 0:
      return n_sync;
    case 1:
      return n_stream;
    case 2:
      return n_hostalloc;
    case 3:
      return n_kernel;
    case 4:
      return n_to_device;
    case 5:
      return n_to_host;
    default:
      return (long)used[0];
  }
}
extern "C" void fakecuda_touch(int d) { context(d); }
static bool is_pinned(const void* p, size_t n) {
  std::lock_guard<std::mutex> l(g);
  auto it = pinned.upper_bound((char*)p);
  if (it == pinned.begin()) return false;
  --it;
  return (char*)p + n <= it->first + it->second;
}
static int device_of(const void* p) {
  std::lock_guard<std::mutex> l(g);
  auto it = mem.upper_bound((char*)p);
  if (it == mem.begin()) return -1;
  --it;
  return (char*)p < it->first + it->second.first ? it->second.second : -1;
}
extern "C" int fakecuda_device_of(const void* p) { return device_of(p); }

#define OK return cudaSuccess
extern "C" {
cudaError_t cudaGetDeviceCount(int* n) {
  *n = 0;
  if (forked()) return fail(cudaErrorInitializationError);
  *n = ndev();
  return *n ? cudaSuccess : fail(cudaErrorNoDevice);
}
cudaError_t cudaGetDevice(int* d) {
  *d = t_dev;
  OK;
}
cudaError_t cudaSetDevice(int d) {
  if (d < 0 || d >= ndev()) return fail(cudaErrorInvalidDevice);
  cudaError_t e = context(d);
  if (e) return e;
  t_dev = d;
  OK;
}
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* p, int d) {
  memset(p, 0, sizeof *p);
  snprintf(p->name, sizeof p->name, "Fake H100 %d", physical(d));
  p->major = 9;
  p->minor = 0;
  p->totalGlobalMem = memory();
  p->multiProcessorCount = 132;
  p->warpSize = 32;
  p->maxThreadsPerBlock = 1024;
  p->maxThreadsPerMultiProcessor = 2048;
  p->sharedMemPerBlock = 49152;
  p->sharedMemPerBlockOptin = 232448;
  p->sharedMemPerMultiprocessor = 233472;
  p->regsPerMultiprocessor = 65536;
  p->regsPerBlock = 65536;
  p->maxThreadsDim[0] = p->maxThreadsDim[1] = 1024;
  p->maxThreadsDim[2] = 64;
  p->maxGridSize[0] = 2147483647;
  p->maxGridSize[1] = p->maxGridSize[2] = 65535;
  p->l2CacheSize = 50 << 20;
  p->totalConstMem = 65536;
  p->pciBusID = physical(d) + 1;
  p->canMapHostMemory = 1;
  p->unifiedAddressing = 1;
  p->concurrentKernels = 1;
  p->maxBlocksPerMultiProcessor = 32;
  p->textureAlignment = 512;
  for (int i = 0; i < 16; i++) p->uuid.bytes[i] = (char)(0x10 * physical(d) + i);
  OK;
}
cudaError_t cudaDeviceGetAttribute(int* v, cudaDeviceAttr a, int d) {
  switch (a) {
    case cudaDevAttrMaxSharedMemoryPerBlockOptin:
      *v = 232448;
      break;
    case cudaDevAttrMultiProcessorCount:
      *v = 132;
      break;
    case cudaDevAttrComputeCapabilityMajor:
      *v = 9;
      break;
    case cudaDevAttrComputeCapabilityMinor:
      *v = 0;
      break;
    case cudaDevAttrMaxThreadsPerBlock:
      *v = 1024;
      break;
    case cudaDevAttrWarpSize:
      *v = 32;
      break;
    default:
      *v = 0;
  }
  OK;
}
cudaError_t cudaDeviceGetPCIBusId(char* b, int n, int d) {
  snprintf(b, n, "0000:%02x:00.0", physical(d) + 1);
  OK;
}
cudaError_t cudaDeviceGetStreamPriorityRange(int* l, int* h) {
  *l = 0;
  *h = -5;
  OK;
}
cudaError_t cudaDeviceCanAccessPeer(int* c, int a, int b) {
  *c = a != b;
  OK;
}
cudaError_t cudaDeviceEnablePeerAccess(int, unsigned) { OK; }
cudaError_t cudaDeviceSynchronize() {
  synchronised("of the device");
  std::vector<Stream*> all;
  {
    std::lock_guard<std::mutex> l(g);
    all.assign(streams.begin(), streams.end());
    all.push_back(&defaults[t_dev]);
  }
  for (auto s : all)
    if (s->dev == t_dev || s == &defaults[t_dev]) wait_for(s, s->enq);
  OK;
}
cudaError_t cudaDriverGetVersion(int* v) {
  *v = 13000;
  OK;
}
cudaError_t cudaRuntimeGetVersion(int* v) {
  *v = 13000;
  OK;
}
cudaError_t cudaGetLastError() {
  cudaError_t e = t_err;
  t_err = cudaSuccess;
  return e;
}
cudaError_t cudaPeekAtLastError() { return t_err; }
const char* cudaGetErrorName(cudaError_t e) {
  return e == 2     ? "cudaErrorMemoryAllocation"
         : e == 46  ? "cudaErrorDevicesUnavailable"
         : e == 3   ? "cudaErrorInitializationError"
         : e == 600 ? "cudaErrorNotReady"
         : e        ? "cudaErrorFake"
                    : "cudaSuccess";
}
const char* cudaGetErrorString(cudaError_t e) {
  return e == 2     ? "out of memory"
         : e == 46  ? "CUDA-capable device(s) is/are busy or unavailable"
         : e == 3   ? "initialization error"
         : e == 600 ? "device not ready"
         : e == 101 ? "invalid device ordinal"
         : e == 100 ? "no CUDA-capable device is detected"
         : e        ? "fake error"
                    : "no error";
}

cudaError_t cudaMalloc(void** p, size_t n) {
  cudaError_t e = context(t_dev);
  if (e) return e;
  {
    std::lock_guard<std::mutex> l(g);
    if (used[t_dev] + n > memory()) {
      *p = nullptr;
      return fail(cudaErrorMemoryAllocation);
    }
  }
  if (posix_memalign(p, 512, n ? n : 512)) return fail(cudaErrorMemoryAllocation);
  if (env("FAKECUDA_POISON", 1) && n <= (64 << 20)) memset(*p, 0xFF, n);  // NaN in every float format
  std::lock_guard<std::mutex> l(g);
  mem[(char*)*p] = {n, t_dev};
  used[t_dev] += n;
  OK;
}
cudaError_t cudaFree(void* p) {
  if (!p) OK;
  std::lock_guard<std::mutex> l(g);
  auto it = mem.find((char*)p);
  if (it == mem.end()) return fail(cudaErrorInvalidValue);
  used[it->second.second] -= it->second.first;
  mem.erase(it);
  free(p);
  OK;
}
cudaError_t cudaMallocAsync(void** p, size_t n, cudaStream_t) { return cudaMalloc(p, n); }
cudaError_t cudaFreeAsync(void* p, cudaStream_t) { return cudaFree(p); }
cudaError_t cudaMemGetInfo(size_t* f, size_t* t) {
  cudaError_t e = context(t_dev);
  if (e) return e;
  *t = memory();
  *f = memory() - used[t_dev];
  OK;
}
cudaError_t cudaHostAlloc(void** p, size_t n, unsigned) {
  cudaError_t e = context(t_dev);
  if (e) return e;
  n_hostalloc++;
  logf("hostalloc %zu", n);
  if (posix_memalign(p, 4096, n ? n : 4096)) return fail(cudaErrorMemoryAllocation);
  std::lock_guard<std::mutex> l(g);
  pinned[(char*)*p] = n;
  OK;
}
cudaError_t cudaFreeHost(void* p) {
  std::lock_guard<std::mutex> l(g);
  pinned.erase((char*)p);
  free(p);
  OK;
}
cudaError_t cudaHostRegister(void* p, size_t n, unsigned) {
  std::lock_guard<std::mutex> l(g);
  pinned[(char*)p] = n;
  OK;
}
cudaError_t cudaHostUnregister(void* p) {
  std::lock_guard<std::mutex> l(g);
  pinned.erase((char*)p);
  OK;
}
cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* a, const void* p) {
  memset(a, 0, sizeof *a);
  int d = device_of(p);
  if (d >= 0) {
    a->type = cudaMemoryTypeDevice;
    a->device = d;
    a->devicePointer = (void*)p;
  } else if (is_pinned(p, 1)) {
    a->type = cudaMemoryTypeHost;
    a->hostPointer = (void*)p;
    a->devicePointer = (void*)p;
  } else {
    a->type = cudaMemoryTypeUnregistered;
    a->hostPointer = (void*)p;
  }
  OK;
}
static cudaError_t copy(void* d, const void* s, size_t n, cudaStream_t st, bool async) {
  cudaError_t e = context(t_dev);
  if (e) return e;
  if (!n) OK;
  bool sd = device_of(s) >= 0, dd = device_of(d) >= 0;
  if (dd && !sd) n_to_device++;
  if (sd && !dd) n_to_host++;
  if (!async) {
    fakecuda_drain(st);
    memcpy(d, s, n);
    OK;
  }
  if (!sd && !is_pinned(s, n)) {
    std::string* staged = new std::string((const char*)s, n);
    fakecuda_enqueue(st, [=] {
      memcpy(d, staged->data(), n);
      delete staged;
    });
    OK;
  }  // pageable: taken at once
  if (!dd && !is_pinned(d, n)) {
    fakecuda_drain(st);
    memcpy(d, s, n);
    OK;
  }
  fakecuda_enqueue(st, [=] { memcpy(d, s, n); });
  OK;
}
cudaError_t cudaMemcpy(void* d, const void* s, size_t n, cudaMemcpyKind) {
  synchronised("copy");
  return copy(d, s, n, nullptr, false);
}
cudaError_t cudaMemcpyAsync(void* d, const void* s, size_t n, cudaMemcpyKind, cudaStream_t st) {
  return copy(d, s, n, st, true);
}
cudaError_t cudaMemcpyPeerAsync(void* d, int, const void* s, int, size_t n, cudaStream_t st) {
  return copy(d, s, n, st, true);
}
cudaError_t cudaMemcpy2DAsync(void* d, size_t dp, const void* s, size_t sp, size_t w, size_t h, cudaMemcpyKind,
                              cudaStream_t st) {
  fakecuda_drain(st);
  for (size_t i = 0; i < h; i++) memcpy((char*)d + i * dp, (const char*)s + i * sp, w);
  OK;
}
cudaError_t cudaMemcpyToSymbol(const void*, const void*, size_t, size_t, cudaMemcpyKind) { OK; }
cudaError_t cudaMemset(void* p, int v, size_t n) {
  memset(p, v, n);
  OK;
}
cudaError_t cudaMemsetAsync(void* p, int v, size_t n, cudaStream_t st) {
  cudaError_t e = context(t_dev);
  if (e) return e;
  fakecuda_enqueue(st, [=] { memset(p, v, n); });
  OK;
}

static cudaError_t new_stream(cudaStream_t* s, int prio) {
  cudaError_t e = context(t_dev);
  if (e) return e;
  Stream* q = new Stream;
  q->dev = t_dev;
  q->priority = prio;
  n_stream++;
  std::lock_guard<std::mutex> l(g);
  streams.insert(q);
  *s = (cudaStream_t)q;
  OK;
}
cudaError_t cudaStreamCreate(cudaStream_t* s) { return new_stream(s, 0); }
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* s, unsigned) { return new_stream(s, 0); }
cudaError_t cudaStreamCreateWithPriority(cudaStream_t* s, unsigned, int p) { return new_stream(s, p); }
cudaError_t cudaStreamDestroy(cudaStream_t s) {
  fakecuda_drain(s);
  OK;
}
cudaError_t cudaStreamSynchronize(cudaStream_t s) {
  synchronised("of a stream");
  fakecuda_drain(s);
  OK;
}
cudaError_t cudaStreamQuery(cudaStream_t s) {
  Stream* q = S(s);
  std::lock_guard<std::mutex> l(q->m);
  return q->done >= q->enq ? cudaSuccess : fail(cudaErrorNotReady);
}
cudaError_t cudaStreamGetPriority(cudaStream_t s, int* p) {
  *p = S(s)->priority;
  OK;
}
cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* c) {
  *c = cudaStreamCaptureStatusNone;
  OK;
}
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t, cudaStreamCaptureStatus* c, unsigned long long* id, cudaGraph_t*,
                                     const cudaGraphNode_t**, const cudaGraphEdgeData**, size_t*) {
  *c = cudaStreamCaptureStatusNone;
  if (id) *id = 0;
  OK;
}
cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode*) { OK; }
cudaError_t cudaStreamAddCallback(cudaStream_t s, cudaStreamCallback_t f, void* u, unsigned) {
  fakecuda_enqueue(s, [=] { f(s, cudaSuccess, u); });
  OK;
}
cudaError_t cudaLaunchHostFunc(cudaStream_t s, cudaHostFn_t f, void* u) {
  fakecuda_enqueue(s, [=] { f(u); });
  OK;
}
cudaError_t cudaEventCreate(cudaEvent_t* e) {
  cudaError_t r = context(t_dev);
  if (r) return r;
  *e = (cudaEvent_t) new Event;
  OK;
}
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* e, unsigned) { return cudaEventCreate(e); }
cudaError_t cudaEventDestroy(cudaEvent_t e) {
  delete (Event*)e;
  OK;
}
cudaError_t cudaEventRecord(cudaEvent_t e, cudaStream_t s) {
  Event* v = (Event*)e;
  Stream* q = S(s);
  v->at = Clock::now();
  std::lock_guard<std::mutex> l(q->m);
  v->s = q;
  v->seq = q->enq;
  OK;
}
cudaError_t cudaEventRecordWithFlags(cudaEvent_t e, cudaStream_t s, unsigned) { return cudaEventRecord(e, s); }
cudaError_t cudaEventQuery(cudaEvent_t e) {
  Event* v = (Event*)e;
  if (!v->s) OK;
  std::lock_guard<std::mutex> l(v->s->m);
  return v->s->done >= v->seq ? cudaSuccess : fail(cudaErrorNotReady);
}
cudaError_t cudaEventSynchronize(cudaEvent_t e) {
  synchronised("of an event");
  Event* v = (Event*)e;
  if (v->s) wait_for(v->s, v->seq);
  OK;
}
cudaError_t cudaEventElapsedTime(float* ms, cudaEvent_t a, cudaEvent_t b) {
  *ms = std::chrono::duration<float, std::milli>(((Event*)b)->at - ((Event*)a)->at).count();
  OK;
}
cudaError_t cudaStreamWaitEvent(cudaStream_t s, cudaEvent_t e, unsigned) {
  Event* v = (Event*)e;
  if (!v->s) OK;
  Stream* from = v->s;
  unsigned long seq = v->seq;
  if (from == S(s)) OK;
  {
    std::lock_guard<std::mutex> l(from->m);
    if (from->done >= seq) OK;
  }
  fakecuda_enqueue_long(s, [=] { wait_for(from, seq); });
  OK;
}
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* a, const void*) {
  memset(a, 0, sizeof *a);
  a->maxThreadsPerBlock = 1024;
  a->numRegs = 32;
  a->binaryVersion = 90;
  a->ptxVersion = 90;
  OK;
}
cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) { OK; }
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* n, const void*, int, size_t, unsigned) {
  *n = 2;
  OK;
}
cudaError_t cudaLaunchKernel(const void* f, dim3, dim3, void** args, size_t, cudaStream_t s) {
  n_kernel++;
  if (f == spin) {
    long cycles = *(long*)args[0];
    fakecuda_enqueue_long(s, [=] { std::this_thread::sleep_for(std::chrono::nanoseconds(cycles)); });
  }
  OK;
}
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t*, const void*, void**) {
  n_kernel++;
  OK;
}
cudaError_t __cudaLaunchKernel(void* f, dim3 g, dim3 b, void** args, size_t n, cudaStream_t s) {
  return cudaLaunchKernel(f, g, b, args, n, s);
}
cudaError_t __cudaGetKernel(void** k, const void* f) {
  *k = (void*)f;
  OK;
}
cudaError_t cudaGetSymbolAddress(void** p, const void*) {
  static char sym[1 << 16];
  *p = sym;
  OK;
}
void** __cudaRegisterFatBinary(void*) {
  static void* h[8];
  return h;
}
void __cudaRegisterFatBinaryEnd(void**) {}
void __cudaUnregisterFatBinary(void**) {}
void __cudaRegisterFunction(void**, const char* f, char*, const char* name, int, void*, void*, void*, void*, int*) {
  if (!spin && strstr(name, "spin_kernel")) spin = f;
}
void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}
char __cudaInitModule(void**) { return 1; }
unsigned __cudaPushCallConfiguration(dim3, dim3, size_t, void*) { return 0; }
cudaError_t __cudaPopCallConfiguration(dim3*, dim3*, size_t*, void*) { OK; }
cudaError_t cudaGetDriverEntryPointByVersion(const char* s, void** f, unsigned, unsigned long long,
                                             cudaDriverEntryPointQueryResult* r) {
  static void* h = dlopen("libcuda.so.1", RTLD_NOW);
  *f = h ? dlsym(h, s) : nullptr;
  if (r) *r = *f ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
  OK;
}
cudaError_t cudaProfilerStart() { OK; }
cudaError_t cudaProfilerStop() { OK; }
#define STUB(name)                      \
  cudaError_t name() {                  \
    logf("unsupported " #name);         \
    return fail(cudaErrorNotSupported); \
  }
}
#pragma GCC diagnostic ignored "-Wbuiltin-declaration-mismatch"
extern "C" int fakecuda_unsupported(const char* s) {
  logf("unsupported %s", s);
  return fail(cudaErrorNotSupported);
}
extern "C" int fakecuda_has_context(int d) {
  std::lock_guard<std::mutex> l(g);
  return d >= 0 && d < kMax && ctx[d];
}
