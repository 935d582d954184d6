//! Compares every instruction set with bytes that other libraries produced.

mod golden_tests {
    mod activations;
    mod layout;
    mod mma;
    mod mx;
    mod mx_groups;
    mod nvfp4;
    mod pytorch;
    mod scaled;
}
