// Runs a grid on one CPU thread: every GPU thread is a fiber, barriers and simdgroup operations are meeting points.
// Found while running: data races and reads of unset elements in threadgroup arrays, indices out of their bounds,
// threads that do not all reach a meeting point, device accesses beyond a buffer (guard pages, set up by the caller).
#pragma once
#include <csetjmp>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <vector>
#if !defined(__x86_64__)
#include <ucontext.h>
#endif

namespace gpu {

constexpr int SIMD = 32;
constexpr size_t STACK = 64 << 10;
enum class State { ready, barrier, simd, done };

struct Fiber {
#if defined(__x86_64__)
    void* sp;
#else
    ucontext_t context;
#endif
    char* stack = nullptr;
    State state;
    int site;
    unsigned parity;
    double value[2];  // posted to the simdgroup; two, for a lane may be one operation ahead
};

static std::vector<Fiber> fibers;
static Fiber scheduler;
static int current;
static int epoch;  // counts the threadgroup barriers passed
static uint3 group_size, group_at, group_count;
static char message[256];
static sigjmp_buf escape;
static void (*entry)();

static void fail(const char* what, int line) {
    std::snprintf(message, sizeof message, "%s (line %d, thread %d)", what, line, current);
    siglongjmp(escape, 1);
}

#if defined(__x86_64__)
extern "C" void oscar_switch(void** from, void* to) __attribute__((visibility("hidden")));
asm(R"(
.text
.hidden oscar_switch
.globl oscar_switch
oscar_switch:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
)");
static void change(Fiber& from, Fiber& to) { oscar_switch(&from.sp, to.sp); }
#else
static void change(Fiber& from, Fiber& to) { swapcontext(&from.context, &to.context); }
#endif

static void yield() { change(fibers[current], scheduler); }

static void fiber_main() {
    entry();
    fibers[current].state = State::done;
    yield();
    std::abort();
}

static void prepare(Fiber& f) {
    if (!f.stack) f.stack = static_cast<char*>(std::malloc(STACK));
    f.state = State::ready;
    f.parity = 0;
#if defined(__x86_64__)
    void** top = reinterpret_cast<void**>(f.stack + STACK - 64);  // 16-byte aligned by malloc
    *--top = nullptr;  // where fiber_main would return to; keeps the stack aligned as after a call
    *--top = reinterpret_cast<void*>(&fiber_main);
    for (int i = 0; i < 6; i++) *--top = nullptr;
    f.sp = top;
#else
    getcontext(&f.context);
    f.context.uc_stack.ss_sp = f.stack;
    f.context.uc_stack.ss_size = STACK;
    f.context.uc_link = nullptr;
    makecontext(&f.context, fiber_main, 0);
#endif
}

static int lane() { return current % SIMD; }

static void barrier(int line, bool) {
    fibers[current].state = State::barrier;
    fibers[current].site = line;
    yield();
}

template <class T> static unsigned meet(int line, T value) {
    Fiber& f = fibers[current];
    const unsigned parity = f.parity;
    f.parity ^= 1;
    std::memcpy(&f.value[parity], &value, sizeof value);
    f.state = State::simd;
    f.site = line;
    yield();
    return parity;
}

static int simd_first() { return current - lane(); }
static int simd_size() { return std::min<int>(SIMD, int(fibers.size()) - simd_first()); }

template <class T> static T posted(int index, unsigned parity) {
    T value;
    std::memcpy(&value, &fibers[simd_first() + index].value[parity], sizeof value);
    return value;
}

template <class T> static T shuffle(int line, T value, int source) {
    const unsigned parity = meet(line, value);
    if (source < 0 || source >= simd_size()) fail("shuffle from a lane that does not exist", line);
    return posted<T>(source, parity);
}

template <class T, class F> static T reduce(int line, T value, F combine) {
    const unsigned parity = meet(line, value);
    T result = posted<T>(0, parity);
    for (int i = 1; i < simd_size(); i++) result = combine(result, posted<T>(i, parity));
    return result;
}

// Threadgroup memory: every element knows who touched it since the last barrier.
struct Shadow {
    int write_epoch = -1, writer = -1, read_epoch = -1, reader = -1;  // reader -2: several
};
struct Array {
    virtual void clear() = 0;
};
static std::vector<Array*> arrays;

template <class T> struct Element {
    T& value;
    Shadow& shadow;
    int line;
    operator T() const {
        if (shadow.writer < 0) fail("threadgroup element read before it is written", line);
        if (shadow.write_epoch == epoch && shadow.writer != current) fail("race: read of another thread's write", line);
        shadow.reader = shadow.read_epoch == epoch && shadow.reader != current ? -2 : current;
        shadow.read_epoch = epoch;
        return value;
    }
    T operator=(T x) const {
        if (shadow.write_epoch == epoch && shadow.writer != current) fail("race: two writes", line);
        if (shadow.read_epoch == epoch && shadow.reader != current) fail("race: write of what is read", line);
        shadow.writer = current;
        shadow.write_epoch = epoch;
        return value = x;
    }
};

template <class T, size_t... N> struct View;
template <class T, size_t First, size_t... Rest> struct View<T, First, Rest...> {
    T* data;
    Shadow* shadow;
    int line;
    auto operator[](size_t i) const {
        if (i >= First) fail("threadgroup index out of bounds", line);
        if constexpr (sizeof...(Rest) == 0) {
            return Element<T>{data[i], shadow[i], line};
        } else {
            constexpr size_t step = (Rest * ...);
            return View<T, Rest...>{data + i * step, shadow + i * step, line};
        }
    }
};
template <class T, size_t... N> struct Shared : Array {
    static constexpr size_t size = (N * ...);
    T data[size];
    Shadow shadow[size];
    int line;
    explicit Shared(int at) : line(at) { arrays.push_back(this); }
    void clear() override {
        std::memset(static_cast<void*>(data), 0xA5, sizeof data);
        for (auto& s : shadow) s = Shadow();
    }
    auto operator[](size_t i) { return View<T, N...>{data, shadow, line}[i]; }
};

// Order in which ready threads run, and in which threadgroups do: 0 forward, 1 backward, else shuffled by the number.
static uint64_t random_state;
static size_t pick(size_t n) {
    random_state = random_state * 6364136223846793005ull + 1442695040888963407ull;
    return size_t((random_state >> 33) % n);
}
static void order(std::vector<int>& v, int schedule) {
    for (size_t i = 0; i < v.size(); i++) v[i] = int(schedule == 1 ? v.size() - 1 - i : i);
    if (schedule > 1)
        for (size_t i = v.size(); i > 1; i--) std::swap(v[i - 1], v[pick(i)]);
}

// Lets a simdgroup go on whose lanes all wait at one operation; false when none can.
static bool release_simdgroups() {
    bool any = false;
    for (size_t first = 0; first < fibers.size(); first += SIMD) {
        const size_t last = std::min(first + SIMD, fibers.size());
        bool together = true;
        for (size_t i = first; i < last; i++)
            together = together && fibers[i].state == State::simd && fibers[i].site == fibers[first].site;
        if (together)
            for (size_t i = first; i < last; i++) fibers[i].state = State::ready;
        any = any || together;
    }
    return any;
}

static void run_group(int schedule) {
    for (Array* a : arrays) a->clear();
    epoch = 0;
    for (auto& f : fibers) prepare(f);
    std::vector<int> turn(fibers.size());
    for (;;) {
        order(turn, schedule);
        for (int i : turn)
            if (fibers[i].state == State::ready) {
                current = i;
                change(scheduler, fibers[i]);
            }
        bool done = true, meeting = true;
        for (auto& f : fibers) {
            done = done && f.state == State::done;
            meeting = meeting && f.state == State::barrier && f.site == fibers[0].site;
        }
        if (done) return;
        if (meeting) {
            epoch++;
            for (auto& f : fibers) f.state = State::ready;
        } else if (!release_simdgroups()) {
            for (auto& f : fibers)
                if (f.state != State::done) {
                    current = int(&f - fibers.data());
                    fail("divergence: not every thread reaches this barrier or simdgroup operation", f.site);
                }
        }
    }
}

static struct sigaction old_segv, old_bus;
static void on_fault(int) {
    std::snprintf(message, sizeof message, "device access outside of its buffer (thread %d)", current);
    siglongjmp(escape, 1);
}

static const char* run(void (*body)(), const uint* groups, const uint* size, int schedule) {
    group_count = {groups[0], groups[1], groups[2]};
    group_size = {size[0], size[1], size[2]};
    entry = body;
    message[0] = 0;
    random_state = uint64_t(schedule);
    fibers.resize(size_t(size[0]) * size[1] * size[2]);
    struct sigaction action = {};
    action.sa_handler = on_fault;
    sigaction(SIGSEGV, &action, &old_segv);
    sigaction(SIGBUS, &action, &old_bus);
    std::vector<int> turn(size_t(groups[0]) * groups[1] * groups[2]);
    order(turn, schedule);
    if (!sigsetjmp(escape, 1))
        for (int g : turn) {
            group_at = {g % groups[0], g / groups[0] % groups[1], g / groups[0] / groups[1]};
            run_group(schedule);
        }
    sigaction(SIGSEGV, &old_segv, nullptr);
    sigaction(SIGBUS, &old_bus, nullptr);
    return message;
}
}  // namespace gpu
