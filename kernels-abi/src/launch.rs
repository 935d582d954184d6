//! Kernels: their families, their ids, and the rows of the families' tables.

use microscale_formats::Dtype;

/// Lanes in a warp.
pub const WARP: u32 = 32;
/// Threads in a thread block of most kernels.
pub const THREADS: u32 = 128;
/// Elements per warp: 32 blocks of 32. Each lane owns the scale of one block of 32, or of two
/// blocks of 16, and a warp stores 32 scale bytes, one sector, at a time.
pub const WARP_ELEMENTS: u32 = 32 * WARP;

/// The conversion that a kernel is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Converts {
    /// None in hardware.
    Nothing,
    /// To or from E2M1.
    E2m1,
    /// To or from E4M3.
    E4m3,
    /// To or from E5M2.
    E5m2,
}

/// Which targets have a kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Targets {
    /// All.
    All,
    /// Those with `wgmma`.
    WithWgmma,
    /// Those without `wgmma`. Targets without FP4 conversions share the text of the oldest target.
    WithoutWgmma,
    /// Those with `mma.sync` of block-scaled FP4.
    WithBlockScale,
    /// Those with `tcgen05`.
    WithTcgen05,
}

/// A kernel: a row of its family's table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Kernel {
    /// The entry point.
    pub name: &'static str,
    /// The dtype of unquantized values, if kernels of the family differ by it.
    pub dtype: Option<Dtype>,
    /// Threads per thread block; for the GEMV, at most.
    pub threads: u32,
    /// Elements per thread block; scale bytes in the layout kernels, rows in the products. 0 where
    /// the parameters have the number of thread blocks.
    pub elements: u32,
    /// Bytes of shared memory of a launch with `threads` threads per thread block.
    pub shared: u32,
    /// Must use the hardware's instruction for it where the target has one.
    pub converts: Converts,
    /// Thread blocks for which a multiprocessor must have registers (`.minnctapersm` and `.maxntid`
    /// in the PTX); 0 for no such limit. More than one applies only to targets with warp groups,
    /// where the next kernel shares the multiprocessor.
    pub resident: u32,
    /// The targets that have the kernel.
    pub targets: Targets,
}

impl Kernel {
    /// The kernel with at most `shared` bytes of shared memory per thread block. Kernels with
    /// `resident` take fewer stages. Others halve threads and shared memory until they fit.
    pub const fn within(mut self, shared: u32) -> Self {
        if self.resident > 0 {
            self.shared = if self.shared < shared { self.shared } else { shared };
            return self;
        }
        while self.shared > shared && self.threads > WARP {
            self.threads /= 2;
            self.shared /= 2;
        }
        self
    }

    /// Elements that a thread handles, as a fraction (numerator, denominator).
    pub const fn elements_per_thread(&self) -> (u32, u32) {
        (self.elements, self.threads)
    }

    /// Elements that a warp handles; rows in the products.
    pub const fn elements_per_warp(&self) -> u32 {
        self.elements / (self.threads / WARP)
    }
}

/// A launch: threads per thread block, elements per thread block, bytes of shared memory.
pub(crate) type Launch = (u32, u32, u32);

/// A row of a family's table.
pub(crate) const fn kernel(
    name: &'static str,
    dtype: Option<Dtype>,
    launch: Launch,
    converts: Converts,
) -> Kernel {
    Kernel {
        name,
        dtype,
        threads: launch.0,
        elements: launch.1,
        shared: launch.2,
        converts,
        resident: 0,
        targets: Targets::All,
    }
}

/// A row with `resident` thread blocks per multiprocessor.
pub(crate) const fn resident(kernel: Kernel, resident: u32) -> Kernel {
    Kernel { resident, ..kernel }
}

/// Kernels of one operation. They share arguments, a launcher and a PTX file for each target.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Family {
    /// [`crate::quantize`].
    Quantize,
    /// [`crate::dequantize`].
    Dequantize,
    /// [`crate::search`].
    Search,
    /// [`crate::amax`].
    Amax,
    /// [`crate::errors`].
    Errors,
    /// [`crate::layout`].
    Layout,
    /// [`crate::gemv`].
    Gemv,
    /// [`crate::experts`].
    Experts,
    /// [`crate::gemm`].
    Gemm,
    /// [`crate::activations`].
    Activations,
    /// [`crate::gptq`].
    Gptq,
}

impl Family {
    /// Every family, in the order of the variants.
    pub const ALL: [Self; 11] = [
        Self::Quantize,
        Self::Dequantize,
        Self::Search,
        Self::Amax,
        Self::Errors,
        Self::Layout,
        Self::Gemv,
        Self::Experts,
        Self::Gemm,
        Self::Activations,
        Self::Gptq,
    ];

    /// The word in the names of its PTX files.
    pub const fn word(self) -> &'static str {
        match self {
            Self::Quantize => "quantize",
            Self::Dequantize => "dequantize",
            Self::Search => "search",
            Self::Amax => "amax",
            Self::Errors => "errors",
            Self::Layout => "layout",
            Self::Gemv => "gemv",
            Self::Experts => "experts",
            Self::Gemm => "gemm",
            Self::Activations => "activations",
            Self::Gptq => "gptq",
        }
    }
}

/// Names one kernel. Only the families' enumerations and configurations create one, so the kernel
/// exists.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KernelId {
    family: Family,
    index: usize,
}

impl KernelId {
    pub(crate) const fn new(family: Family, index: usize) -> Self {
        Self { family, index }
    }

    /// The family.
    pub const fn family(self) -> Family {
        self.family
    }

    /// The number in the family's table.
    pub const fn index(self) -> usize {
        self.index
    }
}

/// Declares the kinds of kernels of a family with its table. Of a row
/// `Kind prefix suffix [launches] converts`, there is a kernel for f32, f16 and bf16 each, called
/// `<prefix>_<dtype><suffix>`; of a row `Kind name launch converts`, one.
macro_rules! kinds {
    ($(#[$doc:meta])* $name:ident by dtype {
        $($(#[$of_kind:meta])* $kind:ident $prefix:literal $suffix:literal [$f32:expr, $f16:expr] $converts:ident;)+
    }) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum $name {
            $($(#[$of_kind])* $kind,)+
        }

        impl $name {
            /// The kernel for a dtype.
            pub const fn of(self, dtype: ::microscale_formats::Dtype) -> $crate::launch::KernelId {
                $crate::launch::KernelId::new($crate::launch::Family::$name, self as usize * 3 + dtype as usize)
            }
        }

        pub(crate) const KERNELS: &[$crate::launch::Kernel] = &[
            $(
                kernel(concat!($prefix, "_f32", $suffix), Some(::microscale_formats::Dtype::F32), $f32, Converts::$converts),
                kernel(concat!($prefix, "_f16", $suffix), Some(::microscale_formats::Dtype::F16), $f16, Converts::$converts),
                kernel(concat!($prefix, "_bf16", $suffix), Some(::microscale_formats::Dtype::Bf16), $f16, Converts::$converts),
            )+
        ];
    };
    ($(#[$doc:meta])* $name:ident {
        $($(#[$of_kind:meta])* $kind:ident $kernel:literal $launch:ident $converts:ident;)+
    }) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum $name {
            $($(#[$of_kind])* $kind,)+
        }

        impl $name {
            /// The kernel.
            pub const fn id(self) -> $crate::launch::KernelId {
                $crate::launch::KernelId::new($crate::launch::Family::$name, self as usize)
            }
        }

        pub(crate) const KERNELS: &[$crate::launch::Kernel] =
            &[$(kernel($kernel, None, $launch, Converts::$converts),)+];
    };
}
pub(crate) use kinds;
