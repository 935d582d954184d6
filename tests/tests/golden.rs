//! The bytes that other libraries made, reproduced on every instruction set.

mod golden_tests {
    mod layout;
    mod mx;
    mod mx_groups;
    mod nvfp4;
    mod pytorch;
    mod scaled;
}
