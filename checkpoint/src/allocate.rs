//! Allocation of bits: a format for each tensor, so that the summed loss is the least within a
//! budget.
//!
//! | file | contents |
//! |---|---|
//! | `choice`, `budget` | the formats to choose among; the limit on the size |
//! | `request` | the request, and how it is carried out |
//! | `measure`, `weighted` | the loss of each tensor in each format |
//! | `groups` | tensors that get one format together |
//! | `hull`, `knapsack` | convex hulls and the linear relaxation; the exact solution |
//! | `allocation` | the outcome, compared with one format for all tensors |
//! | `recipe`, `patterns` | the outcome as a recipe file |

pub(crate) mod allocation;
pub(crate) mod budget;
pub(crate) mod choice;
pub(crate) mod groups;
pub(crate) mod hull;
pub(crate) mod knapsack;
pub(crate) mod measure;
pub(crate) mod patterns;
pub(crate) mod recipe;
pub(crate) mod request;
pub(crate) mod weighted;
