//! The inputs that the fuzzer has found worth keeping, `fuzz/corpus/`, through the targets that it found them
//! with: no panic, no more memory than such small files deserve, an end, and nothing written but where output
//! was asked for.

use std::alloc::{GlobalAlloc, Layout, System};
use std::fs;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use microscale_test_support::{data_dir, hostile};

/// The most bytes of a single allocation, as of the fuzzer's.
const MOST_AT_ONCE: usize = 256 << 20;

/// The longest that an input may take. Usually they take milliseconds; the rest is for machines that do other
/// things too.
const LONGEST: Duration = Duration::from_secs(20);

/// Counts on the system's allocator.
struct Counting;

/// The largest allocation so far.
static LARGEST: AtomicUsize = AtomicUsize::new(0);

// SAFETY: every call is handed on as it came.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        LARGEST.fetch_max(layout.size(), Ordering::Relaxed);
        // SAFETY: the caller's promises are those that are asked for here.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        LARGEST.fetch_max(layout.size(), Ordering::Relaxed);
        // SAFETY: the caller's promises are those that are asked for here.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn realloc(&self, old: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        LARGEST.fetch_max(size, Ordering::Relaxed);
        // SAFETY: the caller's promises are those that are asked for here.
        unsafe { System.realloc(old, layout, size) }
    }

    unsafe fn dealloc(&self, old: *mut u8, layout: Layout) {
        // SAFETY: the caller's promises are those that are asked for here.
        unsafe { System.dealloc(old, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Replays a target's corpus.
fn replay(target: &str) {
    let folder = data_dir().join("fuzz/corpus").join(target);
    let mut inputs: Vec<_> = fs::read_dir(&folder)
        .unwrap_or_else(|error| panic!("{}: {error}", folder.display()))
        .map(|entry| entry.unwrap().path())
        .collect();
    inputs.sort();
    assert!(!inputs.is_empty(), "{} is empty", folder.display());
    for input in inputs {
        let (bytes, start) = (fs::read(&input).unwrap(), Instant::now());
        let done = catch_unwind(AssertUnwindSafe(|| hostile::run(target, &bytes)));
        assert!(done.is_ok(), "{} panics", input.display());
        assert!(start.elapsed() < LONGEST, "{} takes {:?}", input.display(), start.elapsed());
        let largest = LARGEST.load(Ordering::Relaxed);
        assert!(
            largest <= MOST_AT_ONCE,
            "{} or another makes an allocation of {largest} bytes",
            input.display()
        );
    }
}

/// A test for each target, so that they run side by side.
macro_rules! replayed {
    ($($target:ident)*) => {
        $(#[test]
        fn $target() {
            replay(stringify!($target));
        })*

        #[test]
        fn every_target_has_a_test() {
            assert!(hostile::TARGETS.iter().map(|target| target.name).eq([$(stringify!($target)),*]));
        }
    };
}

replayed! { safetensors gguf imatrix pytorch directory packed parts ptx tensors recipe }
