//! Having kernels compiled before they are used, so that the first operation does not wait.

use microscale_kernels_abi::{Amax, Errors, Family, KernelId};

use crate::element::Dtype;
use crate::error::Result;
use crate::gpu::handle::Gpu;
use crate::gpu::launch;
use crate::recipe::Recipe;
use crate::scheme::{Global, Scheme};

impl Gpu {
    /// Has the driver compile the kernels of a family, for unquantized values or results of a dtype, or for
    /// all: operations would otherwise wait for theirs at their first call. Kernels that are compiled already
    /// cost nothing.
    ///
    /// # Errors
    /// [`Error::Gpu`](crate::Error::Gpu) if the driver refuses.
    pub fn preload(&self, family: Family, dtype: Option<Dtype>) -> Result<()> {
        let wanted = |id: &KernelId| {
            let takes = id.kernel().dtype;
            id.family() == family && (dtype.is_none() || takes.is_none() || takes == dtype)
        };
        let of_target = |id: &KernelId| id.kernel().targets.contain(self.kernels.target());
        self.compile(KernelId::all().filter(of_target).filter(wanted))
    }

    /// [`Self::preload`] for the kernels that a recipe needs with values of a dtype whose rows start on 16
    /// bytes: quantizing them, with a global scale that is computed or given, and finding the loss.
    ///
    /// # Errors
    /// Those of [`Self::preload`], [`Error::NoKernel`](crate::Error::NoKernel) and
    /// [`Error::NoSearch`](crate::Error::NoSearch).
    pub fn preload_recipe(&self, recipe: &Recipe, dtype: Dtype) -> Result<()> {
        let mut wanted = vec![
            launch::quantizer(recipe, dtype, true)?,
            // Losses are measured on values in f32, whose rows have no gaps.
            launch::dequantizer(recipe.format(), Dtype::F32, true)?,
            Errors::Errors.of(dtype),
        ];
        if let Scheme::Nvfp4(_, global) = recipe.scheme {
            wanted.push(Amax::Aligned.of(dtype));
            if global == Global::FromAmax {
                wanted.push(Amax::Nvfp4Plan.of(dtype));
            }
        }
        self.compile(wanted)
    }

    /// Makes kernels ready, one after the other: the driver compiles one at a time.
    fn compile(&self, wanted: impl IntoIterator<Item = KernelId>) -> Result<()> {
        wanted.into_iter().try_for_each(|id| self.kernels.ready(id).map(|_| ()))
    }
}
