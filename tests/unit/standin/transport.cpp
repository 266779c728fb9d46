// Drives the transport.cuh of series deepep/567632dd over an NVSHMEM of two PEs in one process, which delivers a put as
// late as it may, at the next quiet, and everything else at once: the most that EFA can reorder.
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <functional>
#include <vector>

#define __device__
#define __forceinline__ inline

static char heap[2][1024];
static std::vector<std::function<void()>> late;
static int quiets = 0;

template <typename T>
static T* at(int pe, const T* mine) {
    return reinterpret_cast<T*>(heap[pe] + (reinterpret_cast<const char*>(mine) - heap[0]));
}

static void nvshmem_quiet() {
    ++quiets;
    for (auto& put : late)
        put();
    late.clear();
}

static void nvshmemx_putmem_nbi_warp(void* dst, const void* src, size_t num_bytes, int pe) {
    late.push_back([=] { std::memcpy(at(pe, static_cast<char*>(dst)), src, num_bytes); });
}

static void nvshmem_int_atomic_add(int* dst, int value, int pe) {
    *at(pe, dst) += value;
}

static void nvshmem_int_p(int* dst, int value, int pe) {
    *at(pe, dst) = value;
}

static void* nvshmem_ptr(const void* ptr, int pe) {
    return pe == 1 ? at(pe, static_cast<char*>(const_cast<void*>(ptr))) : nullptr;
}

static void atomicAdd(unsigned long long* dst, int value) {
    *dst += value;
}

#define EP_NVSHMEM_API
#include "transport.cuh"

using namespace deep_ep;

// Chunks of tokens and the tail that counts them, as the senders of internode.cu post them; returns how many tokens the
// receiver was told of before they were there.
static int send_chunks(bool in_order) {
    auto src = reinterpret_cast<char*>(heap[0]), dst = src + 256;
    auto tail = reinterpret_cast<uint64_t*>(src + 512);
    int missing = 0;
    for (int token = 0; token < 12; token += 4) {
        std::memset(src + token, 'a', 4);
        nvshmemi_ibgda_put_nbi_warp<true>(reinterpret_cast<uint64_t>(dst + token), reinterpret_cast<uint64_t>(src + token), 4, 1, 3, 0, 0);
        if (in_order)
            complete_puts();
        nvshmemi_ibgda_amo_nonfetch_add(tail, 4, 1, 3);
        for (uint64_t i = 0; i < *at(1, tail); ++i)
            missing += *at(1, dst + i) != 'a';
    }
    return missing;
}

int main() {
    const int overtaken = send_chunks(false);
    std::memset(heap, 0, sizeof(heap));
    late.clear();
    const int missing = send_chunks(true);

    auto count = reinterpret_cast<int*>(heap[0] + 600);
    nvshmemi_ibgda_amo_nonfetch_add(count, -8, 1, 0);  // as low-latency mode sends its counts
    nvshmemi_ibgda_rma_p(count + 1, 7, 1, 0);
    auto home = reinterpret_cast<uint64_t*>(heap[0] + 640);
    *home = 0xffffffffull;
    nvshmemi_ibgda_amo_nonfetch_add(home, 1, 0, 0, true);
    const auto ptr = reinterpret_cast<uint64_t>(heap[0] + 8);
    quiets = 0;
    for (int i = 0; i < num_qps_per_pe(); ++i)
        nvshmemi_ibgda_quiet(1, i);

    std::printf("overtaken=%d missing=%d count=%d p=%d home=%llx qps=%d quiets=%d mine=%d peer=%d far=%d\n",
                overtaken, missing, *at(1, count), *at(1, count + 1), static_cast<unsigned long long>(*home),
                ibgda_get_state()->num_rc_per_pe >= 1 << 20, quiets, nvshmemi_get_p2p_ptr(ptr, 0, 0) == ptr,
                nvshmemi_get_p2p_ptr(ptr, 0, 1) == reinterpret_cast<uint64_t>(heap[1] + 8), nvshmemi_get_p2p_ptr(ptr, 1, 0) == 0);
}
