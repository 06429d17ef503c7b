// NCCL over shared memory, for fake devices: each operation runs on its stream's thread, so that the host never waits
// in it.
#include <cuda_runtime_api.h>
#include <nccl.h>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <functional>
#include <set>
#include <string>
#include <vector>
#include <thread>
#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

extern "C" void fakecuda_enqueue_long(cudaStream_t, std::function<void()>);
extern "C" void fakecuda_drain(cudaStream_t);
extern "C" void fakecuda_touch(int);
static const size_t CH = 1 << 20;
static const int MAXR = 64;
struct Shared {
  std::atomic<int> magic;
  std::atomic<unsigned> arrived[2];
  std::atomic<unsigned> gen;
  std::atomic<int> pid[MAXR];
  std::atomic<int> dev[MAXR];
  char pad[4096];
};
struct ncclComm {
  Shared* sh;
  char* slots;
  int rank, n, dev;
  std::atomic<int> aborted{0};
  std::atomic<int> err{0};
  std::string name;
  size_t bytes;
  std::vector<std::pair<double, ncclDataType_t>> premul;
  std::set<cudaStream_t> streams;
  std::atomic<unsigned long> launched{0}, ended{0};
};
static void logf(const char* what, ncclComm* c, size_t n) {
  static const char* f = getenv("FAKECUDA_LOG");
  if (!f) return;
  char b[256];
  int m =
      snprintf(b, sizeof b, "%d nccl %s rank %d of %d count %zu\n", getpid(), what, c ? c->rank : -1, c ? c->n : 0, n);
  int fd = open(f, O_WRONLY | O_APPEND | O_CREAT, 0666);
  if (fd >= 0) {
    (void)!write(fd, b, m);
    close(fd);
  }
}
static bool detects() {
  static bool d = getenv("FAKENCCL_DETECTS_DEATH") != nullptr;
  return d;
}
static bool barrier(ncclComm* c) {  // false: aborted
  unsigned gen = c->sh->gen.load();
  if (c->sh->arrived[0].fetch_add(1) + 1 == (unsigned)c->n) {
    c->sh->arrived[0] = 0;
    c->sh->gen.fetch_add(1);
    return !c->aborted;
  }
  for (long i = 0; c->sh->gen.load() == gen; i++) {
    if (c->aborted) return false;
    if (i > 200) usleep(100);
    if (detects() && i % 512 == 511)
      for (int r = 0; r < c->n; r++)
        if (kill(c->sh->pid[r], 0)) { c->err = ncclRemoteError; }
  }
  return !c->aborted;
}
static size_t size_of(ncclDataType_t t) {
  switch (t) {
    case ncclInt8:
    case ncclUint8:
    case ncclFloat8e4m3:
    case ncclFloat8e5m2:
      return 1;
    case ncclFloat16:
    case ncclBfloat16:
      return 2;
    case ncclInt32:
    case ncclUint32:
    case ncclFloat32:
      return 4;
    default:
      return 8;
  }
}
static float bf(unsigned short v) {
  unsigned u = (unsigned)v << 16;
  float f;
  memcpy(&f, &u, 4);
  return f;
}
static unsigned short fb(float f) {
  unsigned u;
  memcpy(&u, &f, 4);
  u += 0x7FFF + ((u >> 16) & 1);
  return u >> 16;
}
template <class A, class F>
static A red(A a, A b, F op) {
  switch ((int)op) {
    case ncclProd:
      return a * b;
    case ncclMax:
      return a > b ? a : b;
    case ncclMin:
      return a < b ? a : b;
    default:
      return a + b;
  }
}
template <class T>
static void acc(T* a, const T* b, size_t n, int op) {
  for (size_t i = 0; i < n; i++) a[i] = red<T>(a[i], b[i], op);
}
static void accumulate(void* a, const void* b, size_t n, ncclDataType_t t, int op) {
  switch (t) {
    case ncclInt8:
      acc((signed char*)a, (const signed char*)b, n, op);
      break;
    case ncclUint8:
      acc((unsigned char*)a, (const unsigned char*)b, n, op);
      break;
    case ncclInt32:
      acc((int*)a, (const int*)b, n, op);
      break;
    case ncclUint32:
      acc((unsigned*)a, (const unsigned*)b, n, op);
      break;
    case ncclInt64:
      acc((long*)a, (const long*)b, n, op);
      break;
    case ncclUint64:
      acc((unsigned long*)a, (const unsigned long*)b, n, op);
      break;
    case ncclFloat32:
      acc((float*)a, (const float*)b, n, op);
      break;
    case ncclFloat64:
      acc((double*)a, (const double*)b, n, op);
      break;
    case ncclFloat16: {
      _Float16* x = (_Float16*)a;
      const _Float16* y = (const _Float16*)b;
      for (size_t i = 0; i < n; i++) x[i] = red<float>(x[i], y[i], op);
      break;
    }
    case ncclBfloat16: {
      auto x = (unsigned short*)a;
      auto y = (const unsigned short*)b;
      for (size_t i = 0; i < n; i++) x[i] = fb(red<float>(bf(x[i]), bf(y[i]), op));
      break;
    }
    default:
      break;
  }
}
static void scale(void* a, size_t n, ncclDataType_t t, double f) {
  switch (t) {
    case ncclFloat32:
      for (size_t i = 0; i < n; i++) ((float*)a)[i] *= f;
      break;
    case ncclFloat64:
      for (size_t i = 0; i < n; i++) ((double*)a)[i] *= f;
      break;
    case ncclFloat16:
      for (size_t i = 0; i < n; i++) ((_Float16*)a)[i] = (float)((_Float16*)a)[i] * f;
      break;
    case ncclBfloat16:
      for (size_t i = 0; i < n; i++) ((unsigned short*)a)[i] = fb(bf(((unsigned short*)a)[i]) * f);
      break;
    case ncclInt32:
      for (size_t i = 0; i < n; i++) ((int*)a)[i] *= f;
      break;
    case ncclInt64:
      for (size_t i = 0; i < n; i++) ((long*)a)[i] *= f;
      break;
    default:
      break;
  }
}
// every rank puts a chunk into its slot; once all have, `use` reads the slots
static void rounds(ncclComm* c, const char* send, size_t bytes, std::function<void(size_t at, size_t len)> use) {
  for (size_t at = 0; at < bytes || at == 0; at += CH) {
    size_t len = bytes - at < CH ? bytes - at : CH;
    if (send && len) memcpy(c->slots + c->rank * CH, send + at, len);
    if (!barrier(c)) return;
    use(at, len);
    if (!barrier(c)) return;
    if (!bytes) break;
  }
}
static thread_local int group = 0;
static thread_local std::vector<std::pair<cudaStream_t, std::function<void()>>> pending;
static ncclResult_t run(ncclComm* c, cudaStream_t s, std::function<void()> f) {
  c->streams.insert(s);
  // One after the other in the order of the calls, whichever streams they are in, as NCCL does it for a communicator.
  auto in_turn = [c, f = std::move(f), turn = c->launched++] {
    for (long i = 0; c->ended.load() != turn && !c->aborted; i++)
      if (i > 200) usleep(100);
    f();
    c->ended++;
  };
  if (group)
    pending.emplace_back(s, std::move(in_turn));
  else
    fakecuda_enqueue_long(s, std::move(in_turn));
  return ncclSuccess;
}
static Shared* map(const std::string& name, int n, char** slots, size_t* bytes) {
  *bytes = sizeof(Shared) + (size_t)n * CH;
  int fd = shm_open(name.c_str(), O_RDWR | O_CREAT, 0600);
  if (fd < 0) return nullptr;
  (void)!ftruncate(fd, *bytes);
  void* p = mmap(nullptr, *bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  close(fd);
  *slots = (char*)p + sizeof(Shared);
  return (Shared*)p;
}
static ncclResult_t init(ncclComm_t* out, int n, const std::string& name, int rank) {
  auto c = new ncclComm;
  c->rank = rank;
  c->n = n;
  c->name = name;
  cudaGetDevice(&c->dev);
  fakecuda_touch(c->dev);
  c->sh = map(name, n, &c->slots, &c->bytes);
  if (!c->sh) return ncclSystemError;
  c->sh->pid[rank] = getpid();
  c->sh->dev[rank] = c->dev + 1;
  *out = c;
  logf("init", c, n);
  return ncclSuccess;
}
extern "C" {
ncclResult_t ncclGetVersion(int* v) {
  *v = 22907;
  return ncclSuccess;
}
ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
  memset(id, 0, sizeof *id);
  static std::atomic<int> k{0};
  snprintf(id->internal, 100, "/fakenccl-%d-%ld-%d", getpid(), (long)time(nullptr), k++);
  return ncclSuccess;
}
ncclResult_t ncclCommInitRankConfig(ncclComm_t* c, int n, ncclUniqueId id, int rank, ncclConfig_t*) {
  ncclResult_t r = init(c, n, id.internal, rank);
  if (r) return r;
  barrier(*c);
  if (rank == 0) shm_unlink(id.internal);
  for (int a = 0; a < n; a++)
    for (int b = 0; b < a; b++)
      if ((*c)->sh->dev[a] == (*c)->sh->dev[b] && (*c)->sh->pid[a] != (*c)->sh->pid[b]) {
        fprintf(stderr, "Duplicate GPU detected : rank %d and rank %d both on CUDA device %d\n", b, a,
                (int)(*c)->sh->dev[a] - 1);
        barrier(*c);
        return ncclInvalidUsage;
      }
  barrier(*c);
  return ncclSuccess;
}
ncclResult_t ncclCommInitRank(ncclComm_t* c, int n, ncclUniqueId id, int rank) {
  return ncclCommInitRankConfig(c, n, id, rank, nullptr);
}
ncclResult_t ncclCommInitRankScalable(ncclComm_t* c, int n, int rank, int, ncclUniqueId* ids, ncclConfig_t* k) {
  return ncclCommInitRankConfig(c, n, ids[0], rank, k);
}
ncclResult_t ncclCommInitAll(ncclComm_t* c, int n, const int* devs) {
  ncclUniqueId id;
  ncclGetUniqueId(&id);
  int d;
  cudaGetDevice(&d);
  for (int i = 0; i < n; i++) {
    cudaSetDevice(devs ? devs[i] : i);
    init(&c[i], n, id.internal, i);
  }
  cudaSetDevice(d);
  shm_unlink(id.internal);
  return ncclSuccess;
}
ncclResult_t ncclCommFinalize(ncclComm_t c) {
  logf("finalize", c, 0);
  for (auto s : c->streams) fakecuda_drain(s);
  return ncclSuccess;
}  // waits for what is queued
ncclResult_t ncclCommDestroy(ncclComm_t c) {
  logf("destroy", c, 0);
  return ncclSuccess;
}
ncclResult_t ncclCommAbort(ncclComm_t c) {
  logf("abort", c, 0);
  c->aborted = 1;
  return ncclSuccess;
}
ncclResult_t ncclCommRevoke(ncclComm_t, int) { return ncclInvalidUsage; }
ncclResult_t ncclCommSplit(ncclComm_t c, int color, int key, ncclComm_t* out, ncclConfig_t*) {
  return ncclInvalidUsage;
}
ncclResult_t ncclCommShrink(ncclComm_t, int*, int, ncclComm_t*, ncclConfig_t*, int) { return ncclInvalidUsage; }
ncclResult_t ncclCommGetAsyncError(ncclComm_t c, ncclResult_t* e) {
  *e = (ncclResult_t)c->err.load();
  return ncclSuccess;
}
ncclResult_t ncclCommCount(const ncclComm_t c, int* n) {
  *n = c->n;
  return ncclSuccess;
}
ncclResult_t ncclCommUserRank(const ncclComm_t c, int* n) {
  *n = c->rank;
  return ncclSuccess;
}
ncclResult_t ncclCommCuDevice(const ncclComm_t c, int* n) {
  *n = c->dev;
  return ncclSuccess;
}
const char* ncclGetErrorString(ncclResult_t r) {
  return r == ncclRemoteError    ? "remote process exited or there was a network error"
         : r == ncclSuccess      ? "no error"
         : r == ncclInvalidUsage ? "invalid usage"
                                 : "fake nccl error";
}
const char* ncclGetLastError(ncclComm_t) { return ""; }
ncclResult_t ncclGroupStart() {
  group++;
  return ncclSuccess;
}
ncclResult_t ncclGroupEnd() {
  if (--group == 0) {
    auto p = std::move(pending);
    pending.clear();
    if (p.size() == 1)
      fakecuda_enqueue_long(p[0].first, std::move(p[0].second));
    else { /* several devices of one process: side by side */
      std::vector<std::thread> t;
      for (auto& x : p) t.emplace_back([f = x.second] { f(); });
      for (auto& x : t) x.join();
    }
  }
  return ncclSuccess;
}
ncclResult_t ncclGroupSimulateEnd(ncclSimInfo_t*) { return ncclSuccess; }
ncclResult_t ncclRedOpCreatePreMulSum(ncclRedOp_t* op, void* s, ncclDataType_t t, ncclScalarResidence_t, ncclComm_t c) {
  double f = t == ncclFloat64    ? *(double*)s
             : t == ncclFloat16  ? (double)*(_Float16*)s
             : t == ncclBfloat16 ? bf(*(unsigned short*)s)
                                 : *(float*)s;
  c->premul.push_back({f, t});
  *op = (ncclRedOp_t)(ncclNumOps + c->premul.size() - 1);
  return ncclSuccess;
}
ncclResult_t ncclRedOpDestroy(ncclRedOp_t, ncclComm_t) { return ncclSuccess; }
static void reduce_into(ncclComm_t c, const void* s, void* r, size_t n, ncclDataType_t t, int op, int root) {
  size_t w = size_of(t);
  double pre = op >= ncclNumOps ? c->premul[op - ncclNumOps].first : 1.0;
  std::string scaled;
  if (pre != 1.0) {
    scaled.assign((const char*)s, n * w);
    scale(&scaled[0], n, t, pre);
    s = scaled.data();
  }
  rounds(c, (const char*)s, n * w, [&](size_t at, size_t len) {
    if (root >= 0 && root != c->rank) return;
    std::string sum(c->slots, len);
    for (int k = 1; k < c->n; k++) accumulate(&sum[0], c->slots + k * CH, len / w, t, op);
    if (op == ncclAvg) scale(&sum[0], len / w, t, 1.0 / c->n);
    memcpy((char*)r + at, sum.data(), len);
  });
}
ncclResult_t ncclAllReduce(const void* s, void* r, size_t n, ncclDataType_t t, ncclRedOp_t op, ncclComm_t c,
                           cudaStream_t st) {
  logf("allreduce", c, n);
  return run(c, st, [=] { reduce_into(c, s, r, n, t, op, -1); });
}
ncclResult_t ncclReduce(const void* s, void* r, size_t n, ncclDataType_t t, ncclRedOp_t op, int root, ncclComm_t c,
                        cudaStream_t st) {
  return run(c, st, [=] { reduce_into(c, s, r, n, t, op, root); });
}
ncclResult_t ncclBroadcast(const void* s, void* r, size_t n, ncclDataType_t t, int root, ncclComm_t c,
                           cudaStream_t st) {
  logf("broadcast", c, n);
  return run(c, st, [=] {
    rounds(c, c->rank == root ? (const char*)s : nullptr, n * size_of(t), [&](size_t at, size_t len) {
      if (c->rank != root || s != r) memcpy((char*)r + at, c->slots + root * CH, len);
    });
  });
}
ncclResult_t ncclBcast(void* b, size_t n, ncclDataType_t t, int root, ncclComm_t c, cudaStream_t st) {
  return ncclBroadcast(b, b, n, t, root, c, st);
}
ncclResult_t ncclAllGather(const void* s, void* r, size_t n, ncclDataType_t t, ncclComm_t c, cudaStream_t st) {
  logf("allgather", c, n);
  size_t b = n * size_of(t);
  return run(c, st, [=] {
    std::string own((const char*)s, b);
    rounds(c, own.data(), b, [&](size_t at, size_t len) {
      for (int k = 0; k < c->n; k++) memcpy((char*)r + k * b + at, c->slots + k * CH, len);
    });
  });
}
ncclResult_t ncclReduceScatter(const void* s, void* r, size_t n, ncclDataType_t t, ncclRedOp_t op, ncclComm_t c,
                               cudaStream_t st) {
  size_t w = size_of(t);
  return run(c, st, [=] {
    std::string all((const char*)s, n * w * c->n);
    reduce_into(c, s, &all[0], n * c->n, t, op, -1);
    memcpy(r, all.data() + c->rank * n * w, n * w);
  });
}
ncclResult_t ncclSend(const void*, size_t, ncclDataType_t, int, ncclComm_t, cudaStream_t) { return ncclInvalidUsage; }
ncclResult_t ncclRecv(void*, size_t, ncclDataType_t, int, ncclComm_t, cudaStream_t) { return ncclInvalidUsage; }
ncclResult_t ncclMemAlloc(void** p, size_t n) { return cudaMalloc(p, n) ? ncclSystemError : ncclSuccess; }
ncclResult_t ncclMemFree(void* p) { return cudaFree(p) ? ncclSystemError : ncclSuccess; }
ncclResult_t ncclCommRegister(const ncclComm_t, void*, size_t, void** h) {
  *h = nullptr;
  return ncclSuccess;
}
ncclResult_t ncclCommDeregister(const ncclComm_t, void*) { return ncclSuccess; }
}
